"""Attention whose mask a graph makes of positions alone: the flag ``is_causal`` in its place, or no mask at all.

Compiled, transformers builds the causal mask that it leaves out in eager mode (``_ignore_causal_mask_sdpa`` of its
``masking_utils``). Attention then reads a mask, and computes what the mask hides. Here a small algebra proves what such
a mask holds, for every size that the graph may have.
"""

from __future__ import annotations

import functools
import inspect
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from . import compat, errors
from .mutation import DEEPEST, Timeline, called, example_of
from .originals import original_or_itself
from .report.source import location


@dataclass(frozen=True)
class Affine:
    """A tensor of whole numbers, ``const + Σ slope · index``; axes count from the last, which is -1."""

    const: int
    slopes: frozenset[tuple[int, int]] = frozenset()  # axis, slope; those of 0 are left out

    def slope(self, axis: int) -> int:
        return dict(self.slopes).get(axis, 0)

    def plus(self, other: Affine, times: int = 1) -> Affine:
        axes = dict(self.slopes) | dict(other.slopes)
        return _affine(
            self.const + times * other.const, {axis: self.slope(axis) + times * other.slope(axis) for axis in axes}
        )

    def moved(self, axis_of: Callable[[int], int]) -> Affine:
        """The same along other axes."""
        return _affine(self.const, {axis_of(axis): slope for axis, slope in self.slopes})


def _affine(const: int, slopes: Mapping[int, int]) -> Affine:
    return Affine(const, frozenset((axis, slope) for axis, slope in slopes.items() if slope))


@dataclass(frozen=True)
class Where:
    """A tensor, of any dtype, that is 1 where none of these numbers is above 0, and 0 elsewhere."""

    limits: frozenset[Affine] = frozenset()

    def moved(self, axis_of: Callable[[int], int]) -> Where:
        return Where(frozenset(limit.moved(axis_of) for limit in self.limits))


Held = Affine | Where
ALWAYS = Where()
NEVER = Where(frozenset((Affine(1),)))
# A query attends to the keys up to its own position: key - query is not above 0.
CAUSAL = Where(frozenset((_affine(0, {-1: 1, -2: -1}),)))


def leave_masks_out(gm: GraphModule) -> tuple[str, ...]:
    """Call attention with ``is_causal=True`` in place of a causal mask, and with no mask in place of one that hides
    nothing, wherever that is certain.

    Checkpointed parts are given their masks, and are looked into. Attention with dropout is left alone: another kernel
    draws other numbers.

    Returns:
        ``file.py:line`` of each attention that was changed.

    Warns:
        FxfuseWarning: a graph that could not be analysed, and is as it was.
    """
    if compat.forward_ad_active():  # which not every kernel has a formula for
        return ()
    try:
        planned = list(_planned(gm, {}))
    except Exception as failure:
        warnings.warn(errors.analysis_failed(failure, ()), stacklevel=2)
        return ()
    for one in planned:
        one.attention.args, one.attention.kwargs = one.args, one.kwargs
        one.masks.erase(one.mask)
    for part in {id(one.gm): one.gm for one in planned}.values():
        part.recompile()
    return tuple(location(one.attention) or "" for one in planned)


class _Planned(NamedTuple):
    """An attention, and what it is called with instead of its mask."""

    gm: GraphModule
    masks: _Masks
    attention: Node
    mask: Node
    args: tuple[Node, ...]
    kwargs: dict[str, Any]


def _planned(gm: GraphModule, given: Mapping[Node, Held]) -> Iterator[_Planned]:
    attention = original_or_itself(F.scaled_dot_product_attention)
    attentions = [node for node in gm.graph.nodes if called(node) is attention]
    parts = compat.checkpointed_parts(gm)
    if not attentions and not parts:
        return
    masks = _Masks(gm, parts, given)
    for part, body in parts.items():
        if list(parts.values()).count(body) == 1:
            arguments = zip(body.graph.find_nodes(op="placeholder"), part.args[1:], strict=False)
            yield from _planned(body, {inside: held for inside, outside in arguments if (held := masks.of(outside))})
    for node in attentions:
        call = masks.without(node)
        if call is not None:
            yield _Planned(gm, masks, node, *call)


# The arguments of ``F.scaled_dot_product_attention``, a builtin that does not tell them.
def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: Any = 0.0,
    is_causal: Any = False,
    scale: Any = None,
    enable_gqa: Any = False,
) -> None: ...


_SIGNATURE = inspect.signature(_attention)


class _Masks:
    """What the tensors of a graph hold that are made of positions alone."""

    def __init__(self, gm: GraphModule, parts: Mapping[Node, GraphModule], given: Mapping[Node, Held]) -> None:
        self._timeline = Timeline(gm.graph)
        self._end = gm.graph.output_node()
        self._harmless = {part for part, body in parts.items() if not _writes_to_arguments(body)}
        self._held: dict[Node, Held | None] = {node: held for node, held in given.items() if not self._is_written(node)}
        self._depth = 0

    def without(self, attention: Node) -> tuple[Node, tuple[Node, ...], dict[str, Any]] | None:
        """The mask of ``attention``, and what it may be called with instead; None where it needs its mask."""
        try:
            arguments = _SIGNATURE.bind(*attention.args, **attention.kwargs).arguments
        except TypeError:
            return None
        query, key, value, mask = (arguments.pop(name, None) for name in ("query", "key", "value", "attn_mask"))
        known = arguments.get("dropout_p", 0.0) == 0 and arguments.get("is_causal", False) is False
        read = [example_of(one) for one in (query, key, value)]
        if not known or not isinstance(mask, Node) or not all(map(compat.is_plain, read)):
            return None
        held = self.of(mask) if not self._timeline.region[attention].levels else None
        if held not in (CAUSAL, ALWAYS) or not _fits(example_of(mask), *read):
            return None
        if held == CAUSAL and not compat.same(read[0].shape[-2], read[1].shape[-2]):
            return None
        return mask, (query, key, value), {**arguments, "is_causal": held == CAUSAL}

    def of(self, handle: Any) -> Held | None:
        """What a tensor or a number certainly is, until the graph ends; None if that is not known."""
        if isinstance(handle, int):  # a larger one may become another number where it meets a tensor
            return Affine(int(handle)) if abs(handle) < _LARGEST else None
        if not isinstance(handle, Node):
            return None
        if handle not in self._held:
            self._held[handle] = None
            self._depth += 1
            if self._depth <= DEEPEST:
                self._held[handle] = self._made(handle)
            self._depth -= 1
        return self._held[handle]

    def _made(self, node: Node) -> Held | None:
        example, make = example_of(node), _MAKERS.get(called(node))
        known = isinstance(example, Tensor) and compat.is_plain(example)
        if make is None or not known or self._is_written(node):
            return None
        try:
            return _stored(make(self.of, node, *node.args, **node.kwargs), example)
        except (TypeError, LookupError):  # of a form that is not known
            return None

    def erase(self, mask: Node) -> None:
        """Erase what nothing reads any more of what made ``mask``, and only made it."""
        unused = [mask]
        while unused:
            node = unused.pop()
            if node.op != "placeholder" and not node.users and self.of(node) is not None:
                before = node.all_input_nodes
                node.graph.erase_node(node)
                unused += [one for one in before if one not in unused]

    def _is_written(self, node: Node) -> bool:
        writers = self._timeline.writers(node, before=self._end)
        return self._timeline.unplaced_write(node) or not self._harmless.issuperset(writers)


def _writes_to_arguments(body: GraphModule) -> bool:
    timeline = Timeline(body.graph)
    return any(map(timeline.is_written, body.graph.find_nodes(op="placeholder")))


def _fits(mask: Tensor, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether eager takes this mask, with the kernels that it takes without: on a CPU those are for two axes or all."""
    weights = (*query.shape[:-1], key.shape[-2])
    axes = mask.dtype == torch.bool and mask.dim() in (2, query.dim()) and query.dim() == key.dim() == value.dim()
    pairs = zip(reversed(mask.shape), reversed(weights), strict=False)
    broadcasts = axes and all(compat.same(size, 1) or compat.same(size, other) for size, other in pairs)
    return broadcasts and compat.same(key.shape[-2], value.shape[-2])


# No sum of so small numbers overflows.
_LARGEST = 1 << 31


def _stored(held: Held | None, example: Tensor) -> Held | None:
    """The same, as a tensor like ``example`` has it: nothing changes along an axis of one."""
    if isinstance(held, Where):
        across = {limit: _across(limit, example) for limit in held.limits}
        if any(low > 0 for low, _ in across.values()):
            return NEVER
        return Where(frozenset(_flat(limit, example) for limit, (_, high) in across.items() if high > 0))
    if held is None:
        return None
    held = _flat(held, example)
    if held in (Affine(0), Affine(1)):
        return ALWAYS if held.const else NEVER
    small = all(abs(number) < _LARGEST for number in (held.const, *dict(held.slopes).values()))
    return held if small and example.dtype == torch.int64 else None


def _flat(held: Affine, example: Tensor) -> Affine:
    return _affine(held.const, {axis: slope for axis, slope in held.slopes if not compat.same(example.shape[axis], 1)})


def _across(limit: Affine, example: Tensor) -> tuple[float, float]:
    """The least and the largest of these numbers, as far as sizes are known."""
    low = high = float(limit.const)
    for axis, slope in limit.slopes:
        size = example.shape[axis]
        end = slope * (size - 1 if isinstance(size, int) else float("inf"))
        low, high = low + min(end, 0), high + max(end, 0)
    return low, high


# --- what nodes make --------------------------------------------------------------------------------------------
# Each takes what its arguments hold, the node, and what the node is called with. An argument that it does not name, or
# a value that it does not expect, is a form that is not known.

Of = Callable[[Any], Held | None]


def _numbers(of: Of, handle: Any) -> Affine | None:
    """What a tensor or a number is as whole numbers on a line; others wrap around and round."""
    held, example = of(handle), example_of(handle)
    if isinstance(example, Tensor) and example.dtype not in (torch.int64, torch.bool):
        return None
    return Affine(1) if held == ALWAYS else Affine(0) if held == NEVER else held if isinstance(held, Affine) else None


def _arange(of: Of, node: Node, *limits: Any, dtype: Any = None, device: Any = None) -> Held | None:
    first, step = (limits[0] if len(limits) > 1 else 0), (limits[2] if len(limits) > 2 else 1)
    return _affine(first, {-1: step}) if type(first) is type(step) is int else None


def _filled(held: Held, of: Of, node: Node, *_: Any, dtype: Any = None, device: Any = None) -> Held | None:
    """With zeros or with ones, in a size or in that of a tensor."""
    return held


def _full(of: Of, node: Node, size: Any, fill_value: Any, *, dtype: Any = None, device: Any = None) -> Held | None:
    return of(fill_value) if type(fill_value) in (bool, int) else None


def _same(of: Of, node: Node, input: Any, *_: Any, **__: Any) -> Held | None:
    """Converted, copied or expanded."""
    held = of(input)
    if example_of(node).dtype == torch.bool and isinstance(held, Affine):  # 1 where it is not 0
        return None if held.slopes else ALWAYS
    return held


def _sum(sign: int, of: Of, node: Node, input: Any, other: Any) -> Affine | None:
    a, b = _numbers(of, input), _numbers(of, other)
    return None if a is None or b is None else a.plus(b, sign)


def _and(of: Of, node: Node, input: Any, other: Any) -> Held | None:
    a, b = of(input), of(other)
    return Where(a.limits | b.limits) if isinstance(a, Where) and isinstance(b, Where) else None


def _not(of: Of, node: Node, input: Any) -> Held | None:
    held = of(input)
    return _elsewhere(held) if example_of(input).dtype == torch.bool else None


def _elsewhere(held: Held | None) -> Where | None:
    """1 where the other is 0."""
    if not isinstance(held, Where) or len(held.limits) > 1:
        return None
    return Where(frozenset(Affine(1).plus(limit, -1) for limit in held.limits)) if held.limits else NEVER


def _compared(least: int, sign: int, of: Of, node: Node, input: Any, other: Any) -> Held | None:
    """Where ``sign · (input - other) + least`` is not above 0."""
    difference = _sum(-1, of, node, input, other)
    return None if difference is None else Where(frozenset((Affine(least).plus(difference, sign),)))


def _equal(negated: bool, of: Of, node: Node, input: Any, other: Any) -> Held | None:
    held, number = of(input), _numbers(of, other)
    if isinstance(held, Where) and number in (Affine(0), Affine(1)):
        return held if (number == Affine(1)) is not negated else _elsewhere(held)
    difference = _sum(-1, of, node, input, other)
    if difference is None or difference.slopes:
        return None
    return ALWAYS if (difference.const == 0) is not negated else NEVER


def _triangle(sign: int, of: Of, node: Node, input: Any, diagonal: Any = 0) -> Held | None:
    """``tril`` or ``triu``: 0 where ``sign · (column - row - diagonal)`` is above 0."""
    held = of(input)
    if not isinstance(held, Where) or type(diagonal) is not int or abs(diagonal) >= _LARGEST:
        return None
    return Where(held.limits | {_affine(-sign * diagonal, {-1: sign, -2: -sign})})


def _reshaped(of: Of, node: Node, input: Any, *_: Any, **__: Any) -> Held | None:
    """The same axes, but for those of one."""
    held, before, after = of(input), _axes(example_of(input)), _axes(example_of(node))
    same = len(before) == len(after) and all(map(compat.same, before.values(), after.values()))
    if held is None or not same or example_of(input).dtype != example_of(node).dtype:  # a view may read other numbers
        return None
    return held.moved(dict(zip(before, after, strict=True)).__getitem__)


def _axes(example: Tensor) -> dict[int, Any]:
    """The axes that are not of one, counted from the last, with their sizes."""
    return {axis: size for axis, size in enumerate(example.shape, -example.dim()) if not compat.same(size, 1)}


def _diff(of: Of, node: Node, input: Any, n: Any = 1, dim: Any = -1, prepend: Any = None) -> Held | None:
    held, axis = _numbers(of, input), dim if dim < 0 else dim - example_of(node).dim()
    if held is None or n != 1:
        return None
    slope = held.slope(axis)
    if prepend is not None:
        goes_on = held.plus(_affine(slope, {axis: slope}), -1)
        one = isinstance(prepend, Node) and compat.same(example_of(prepend).shape[axis], 1)
        if not one or _numbers(of, prepend) != goes_on:
            return None
    return Affine(slope)


def _cumsum(of: Of, node: Node, input: Any, dim: Any) -> Held | None:
    held = _numbers(of, input)
    if held is None or held.slopes:
        return None
    return _affine(held.const, {dim if dim < 0 else dim - example_of(node).dim(): held.const})


def _getitem(of: Of, node: Node, input: Any, index: Any) -> Held | None:
    held, example = of(input), example_of(input)
    index = index if isinstance(index, tuple) else (index,)
    if held is None or not isinstance(example, Tensor):
        return None
    if index and all(isinstance(one, Node) for one in index):
        return _taken(of, input, index)
    return _sliced(held, example, example_of(node), index)


def _taken(of: Of, input: Node, index: tuple[Node, ...]) -> Affine | None:
    """The entries at given indices, one for each axis."""
    line, sizes = _numbers(of, input), example_of(input).shape
    if line is None or len(index) != len(sizes):
        return None
    found = Affine(line.const)
    for axis, one in enumerate(index, -len(index)):
        example = example_of(one)
        places = _numbers(of, one) if isinstance(example, Tensor) and example.dtype == torch.int64 else None
        if places is None or places.const < 0 or any(slope < 0 for _, slope in places.slopes):
            return None  # an index below 0 counts from the end
        last = places.const + sum(slope * (example.shape[along] - 1) for along, slope in places.slopes)
        if not compat.is_less(last, sizes[axis]):
            return None  # which raises an error
        found = found.plus(places, line.slope(axis))
    return found


def _sliced(held: Held, example: Tensor, out: Tensor, index: tuple[Any, ...]) -> Held | None:
    """Parts from some place on, and further axes."""
    whole = slice(None)
    named = sum(one is not None and one is not Ellipsis for one in index)
    index = index if Ellipsis in index else (*index, Ellipsis)
    at = index.index(Ellipsis)
    index = (*index[:at], *[whole] * (example.dim() - named), *index[at + 1 :])
    target: dict[int, int] = {}  # from the axes of the input to those of the result
    axis = 0
    for place, one in enumerate(index):
        if one is None:
            continue
        # A part that begins elsewhere has other numbers; one that ends earlier has not.
        if not isinstance(one, slice) or one.start not in (None, 0) or one.step not in (None, 1):
            return None
        target[axis - example.dim()] = place - out.dim()
        axis += 1
    return held.moved(target.__getitem__)


def _spellings(name: str) -> tuple[Any, ...]:
    """An operator of Python, the method that torch 2.11 has for some, and a function and a method of that name."""
    own = (getattr(torch, name), name) if hasattr(torch, name) else ()
    return getattr(operator, name), f"__{name.removesuffix('_')}__", *own


_RESHAPED = ("unsqueeze", "squeeze", "view", "reshape", "flatten")
_SAME = ("to", "bool", "long", "int", "type", "contiguous", "clone", "expand", "expand_as", torch.clone)
_MAKERS: dict[Any, Callable[..., Held | None]] = {
    torch.arange: _arange,
    **dict.fromkeys((torch.ones, torch.ones_like, "new_ones"), functools.partial(_filled, ALWAYS)),
    **dict.fromkeys((torch.zeros, torch.zeros_like, "new_zeros"), functools.partial(_filled, NEVER)),
    **dict.fromkeys((torch.full, torch.full_like), _full),
    **dict.fromkeys(_SAME, _same),
    **dict.fromkeys((*_RESHAPED, *(getattr(torch, name) for name in _RESHAPED if hasattr(torch, name))), _reshaped),
    **dict.fromkeys((torch.diff, "diff"), _diff),
    **dict.fromkeys((torch.cumsum, "cumsum"), _cumsum),
    **dict.fromkeys((torch.tril, "tril"), functools.partial(_triangle, 1)),
    **dict.fromkeys((torch.triu, "triu"), functools.partial(_triangle, -1)),
    **dict.fromkeys((torch.logical_and, "logical_and", torch.bitwise_and), _and),
    **dict.fromkeys((torch.logical_not, "logical_not", torch.bitwise_not), _not),
    operator.getitem: _getitem,
    **{
        spelling: make
        for name, make in (
            ("and_", _and),
            ("invert", _not),
            ("add", functools.partial(_sum, 1)),
            ("sub", functools.partial(_sum, -1)),
            ("le", functools.partial(_compared, 0, 1)),
            ("lt", functools.partial(_compared, 1, 1)),
            ("ge", functools.partial(_compared, 0, -1)),
            ("gt", functools.partial(_compared, 1, -1)),
            ("eq", functools.partial(_equal, False)),
            ("ne", functools.partial(_equal, True)),
        )
        for spelling in _spellings(name)
    },
}
