"""The record of a head: what the report says became of it, and why."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ..algebra import Head
from ..analysis import Analysis
from ..candidate import Candidate
from ..costs import eager_bytes, total
from ..mutation import example_of
from ..passes import why
from ..readers import Reader
from .chain import Told, uses_of
from .records import Ending, Projection, Site
from .source import function_name, line_at, location, module_path, projection_name
from .telling import telling
from .weights import captured_with

# The passes of a head: how each is computed, and what it reads.
Passes = Sequence[tuple[str, Sequence[Reader]]]


def told_of(candidate: Candidate, analysis: Analysis, end: Ending | None, in_checkpoint: bool) -> Told:
    """How the logits are used, as far as that can be told."""
    told = Told()
    with telling():
        projections = {
            node: Projection(projection_name(node, head.weight), location(node) or "")
            for node, head in candidate.projections.items()
        }
        returned = [escaped.node for escaped in candidate.escaped]
        told = uses_of(projections, candidate.flow, analysis.carries, end, in_checkpoint, returned)
    return told


def _trained(candidate: Candidate) -> tuple[bool, bool]:
    """Whether the hidden states and the weight require a gradient."""
    head = candidate.head
    return bool(example_of(head.input).requires_grad), bool(example_of(head.weight).requires_grad)


def site_of(candidate: Candidate, passes: Passes, told: Told, in_checkpoint: bool = False, memory: int = 0) -> Site:
    """The record of a head; with less in it, if that cannot be told, for a head is fused all the same."""
    fused, head = candidate.kept is None, candidate.head
    site = Site(
        status="kept" if not fused else "deferred" if candidate.escaped else "fused",
        pattern=" → ".join(candidate.trail or (function_name(candidate.node),)),
        where=location(candidate.node) or "",
        module="",
        rows=candidate.rows,
        hidden=_number(head.hidden),
        vocab=_number(head.vocab),
        dtype=str(head.dtype).removeprefix("torch."),
        variant="; ".join(dict.fromkeys(variant for variant, _ in passes)),
        reason=candidate.kept,
        chain=told.chain,
        uses=told.uses,
        rows_hint=candidate.rows,
        projections=told.projections,
    )
    with telling():
        shape = example_of(candidate.node).shape
        rows = sum(map(_rows, candidate.projections.values()))
        patterns = dict.fromkeys(reader.pattern for _, readers in passes for reader in readers) if fused else ()
        logits, converted, gradient = eager_bytes(candidate, {variant for variant, _ in passes})
        causes = _causes(candidate, passes, in_checkpoint, memory) if fused else ()
        site = replace(
            site,
            pattern=" + ".join(patterns) or site.pattern,
            module=module_path(candidate.node, head.weight),
            rows=_number(rows),
            bytes_saved=_saved(candidate, logits, converted, gradient) if fused else 0,
            reason=None if fused or site.reason is None else replace(site.reason, source=line_at(site.reason.where)),
            source=line_at(site.where),
            why="; ".join(causes),
            shape=tuple(map(_number, shape)),
            rows_hint=None if logits is None else candidate.rows,
            weights=captured_with(head.weight),
            logits_bytes=logits,
            converted_bytes=converted,
            gradient_bytes=gradient,
            copied_bytes=candidate.copied if fused else 0,
        )
    return site


def _causes(candidate: Candidate, passes: Passes, in_checkpoint: bool, memory: int) -> Iterator[str]:
    """Why a head is computed as it is."""
    trained = _trained(candidate)
    several = len({variant for variant, _ in passes}) > 1
    found = [(variant, why(variant, readers, any(trained), in_checkpoint, memory)) for variant, readers in passes]
    yield from dict.fromkeys(f"{variant}: {cause}" if several else cause for variant, cause in found)
    input, weight = trained
    if input != weight and any(reader.source.requires_grad for _, reader in candidate.readers):
        yield "the weight is frozen and gets none" if input else "the hidden states need none"
    if candidate.escaped:
        leave = "the logits that leave the graph are computed when something reads their values"
        yield f"what reads logits inside is fused, and {leave}" if candidate.readers else leave


def _rows(head: Head) -> Any:
    """How many rows a projection has: a number, or an expression."""
    sizes = list(example_of(head.input).shape)
    del sizes[head.axis]
    return math.prod(sizes)


def _number(size: Any) -> int | str:
    return size if isinstance(size, int) else str(size)


def _saved(candidate: Candidate, *sizes: int | None) -> int | None:
    """What is not built, of these ``sizes``, less what is in its place; None where that is not known."""
    built = total(*sizes)
    return None if built is None else max(0, built - candidate.copied)
