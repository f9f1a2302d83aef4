"""Hooks that libraries put on what models return, by what they do: most want a gradient, which has to be there then."""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

_SIGNALS = {
    ("torch.distributed.fsdp._runtime_utils", "_pre_backward_hook"),  # FSDP1
    ("lightning.fabric.wrappers", "_backward_hook"),
    ("lightning_fabric.wrappers", "_backward_hook"),
}


def is_signal(hook: Any) -> bool:
    """Whether a tensor's hook only wants to know that the backward begins.

    As those of FSDP do that gather weights, and Lightning Fabric's that asks whether the loss went through it.
    """
    if isinstance(hook, functools.partial):
        return _name_of(hook.func, "__name__") in _SIGNALS
    owner = type(getattr(hook, "__self__", None))
    return owner.__module__.startswith("torch.distributed.fsdp.") and hook.__name__ == "_pre_backward"


_DEEPSPEED = "deepspeed.runtime.utils"


def is_factor(hook: Any) -> bool:
    """Whether all that a tensor's hook does to the gradient is to multiply it by a number.

    As DeepSpeed's does, which every output of its engine has: it divides by the steps of gradient accumulation where
    the program calls ``backward`` itself. Beside a loss that the graph computed, the gradient of the logits does not
    come by it under Inductor either.
    """
    made_in = "OutputBackwardHookManager._make_backward_hook.<locals>.backward_hook"
    return _name_of(hook, "__qualname__") == (_DEEPSPEED, made_in)


def _name_of(hook: Any, name: str) -> tuple[str | None, str | None]:
    """The module of a hook and its name, as far as it has any: it may be any callable object."""
    return getattr(hook, "__module__", None), getattr(hook, name, None)


def node_is_only_asked_for() -> bool:
    """Whether a tensor's node is asked for by DeepSpeed, which puts that hook on what has one."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(("torch.", "fxfuse.")):
        frame = frame.f_back
    if frame is None or frame.f_globals.get("__name__") != _DEEPSPEED:
        return False
    return frame.f_code.co_name == "_traverse_and_register_hooks"
