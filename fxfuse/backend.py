"""The backend: options → rewrite → the inner backend (Inductor)."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.fx import Graph, GraphModule

from . import compat, errors
from .attention import leave_masks_out
from .escape import first_reads, on_plain_tensors, restored, unread_with_gradients
from .graph import rewrite
from .lowering import lower
from .options import PREFIX, Options
from .recompute import keep_what_is_read
from .rehearsal import Rehearsals
from .report import announce
from .report.captured import captured
from .report.records import Site, Watched, journal

journal.listeners.append(announce)


def fxfuse(
    gm: GraphModule,
    example_inputs: list[Tensor],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph: ``torch.compile(model, backend="fxfuse", mode=…, options=…)``.

    Args:
        gm: the captured graph, rewritten in place.
        example_inputs: its inputs.
        mode: a mode of Inductor.
        options: keys of ``fxfuse.options.Options`` with the prefix ``fxfuse.``; all others go to the inner backend,
            Inductor if no other is said.

    Returns:
        What runs in the graph's place: same arguments and results, but for logits that leave it, which are
        ``DeferredLogits``.

    Raises:
        ValueError: options that are no dict of strings; an unknown option (the nearest known one is named); a value of
            the wrong type or range.
        FxfuseError: under ``fxfuse.strict``, where a head is kept dense for a reason that the user can mend.

    Warns:
        FxfuseWarning: a graph that could not be analysed, and is compiled as it was; a call whose arguments share
            memory as those that were captured did not, which runs as captured; a report that lacks something.
    """
    try:
        own, rest = Options.parse(options)
        inner = _inner(own.inner, mode, rest)
        (results,) = gm.graph.output_node().args
        whole = compat.is_whole_graph(gm)
        compat.keep_from_precompiled(gm)
        places = () if whole else first_reads(gm.graph)  # only parts are told where they read what others return
        record = replace(captured(gm), enabled=own.enabled)
        watchers = [watcher() for watcher in journal.watchers]
        sites, escapes, apart = rewrite(gm, own, record.ending, watchers) if own.enabled else ((), (), None)
        unmasked = leave_masks_out(gm) if own.enabled and own.causal_attention else ()
    except (ValueError, errors.FxfuseError) as error:
        raise compat.as_raised(error) from None
    unread = unread_with_gradients(gm.graph)  # which compilers may change
    watched = Watched(watchers, mode, options or {}) if watchers else None
    with journal.recorded(sites, replace(record, unmasked=unmasked), watched):
        for site in sites:
            if own.strict and site.reason is not None and site.reason.mendable:
                refusal = errors.kept_dense(site.where, site.reason)
                raise compat.as_raised(refusal)
        run = _compiled(gm, example_inputs, inner, own, sites, bool(unmasked))
    if escapes:
        assert isinstance(results, (tuple, list))
        run = restored(run, len(results), escapes, unread, own.min_logits_bytes, own.memory)
    if apart is not None:
        run = apart.guard(run)
    return run if whole else on_plain_tensors(run, places)


def _compiled(
    gm: GraphModule,
    example_inputs: list[Tensor],
    inner: Callable[..., Any],
    own: Options,
    sites: Sequence[Site],
    is_changed: bool,
) -> Callable[..., Any]:
    """What the inner backend makes of a rewritten graph, or of one whose heads were all kept."""
    kept = all(site.status == "kept" for site in sites)
    if is_changed or not kept:
        compat.make_code(gm)  # once, after all that changes the graph
    if kept:
        return inner(gm, example_inputs)
    nested = compat.is_nested(gm)  # such graphs are parted on their own
    compat.change_in_inductor(inner, lower, nested, fingerprint())
    wanted = own.recompute and not nested
    with Rehearsals() as rehearsals:

        def change(graph: Graph) -> None:
            rehearsals.begin(graph)
            if wanted and compat.is_joint(graph):
                keep_what_is_read(graph)

        tag = fingerprint() + "-recomputing" * wanted
        changes = compat.change_early_in_inductor(inner, change, tag)
        with compat.cache_key(fingerprint()), compat.recomputed(wanted and changes):
            return inner(gm, example_inputs)


def _inner(name: str, mode: str | None, options: dict[str, Any]) -> Callable[..., Any]:
    if name == "fxfuse":
        raise errors.bad_option(f"{PREFIX}inner", name, "a backend other than fxfuse itself")
    if name == "inductor":
        known = compat.inductor_options()
        for key in options:
            if key.replace("-", "_") not in known:
                own = {PREFIX + field for field in Options.__dataclass_fields__}
                raise errors.unknown_option(key, known | own)
    elif name not in compat.backends():
        others = ", ".join(known for known in compat.backends() if known != "fxfuse")
        raise errors.bad_option(f"{PREFIX}inner", name, f"one of {others}")
    return compat.inner_backend(name, mode, options)


@functools.cache
def fingerprint() -> str:
    """A hash of fxfuse's sources.

    AOTAutograd's cache key names the ops of a graph and not their autograd formulas: without this, a cached
    backward of an older fxfuse would be served after an upgrade.
    """
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return f"fxfuse-{digest.hexdigest()[:16]}"
