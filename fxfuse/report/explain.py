"""``fxfuse.sites()``, ``fxfuse.reads()``, ``fxfuse.summary()`` and ``fxfuse.explain()``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..compat import uncompiled
from ..options import PREFIX
from .records import Read, Report, Site, journal


def sites() -> tuple[Site, ...]:
    """Every head that was seen in a graph compiled in this process, in order of compilation."""
    return journal.report().sites


def reads() -> tuple[Read, ...]:
    """Every place where deferred logits were computed after all, or a weight was copied for them, in this process."""
    return journal.report().reads


def summary() -> Report:
    """Every graph compiled in this process, and what became of its heads until now; printed, a table."""
    return journal.report()


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """What fxfuse does with the heads of ``fn``, found by calling it once.

    Args:
        fn: a function or module, compiled already or not. If it was compiled with options of fxfuse, they hold.
        *args, **kwargs: what it is called with. The call is real, side effects included.

    Returns:
        The graphs that were captured, with their sites and what became of these in this call; printed, a table. No
        code is generated: the graphs run in eager mode.

    Note:
        As ``torch._dynamo.explain`` does, it forgets all compiled code of this process; functions that were
        compiled before are compiled again when they are next called.
    """
    from ..backend import fxfuse

    fn, options = uncompiled(fn)
    own = {key: value for key, value in options.items() if key.startswith(PREFIX)}
    since = len(journal)
    torch._dynamo.reset()
    try:
        torch.compile(fn, backend=fxfuse, options={**own, f"{PREFIX}inner": "eager"})(*args, **kwargs)
    finally:
        torch._dynamo.reset()
    return journal.report(since)
