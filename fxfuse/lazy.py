"""The values of deferred logits: how they come to be, once, when something needs them.

A ``State`` stands for one tensor: what it is (``described``), or what operator makes it of which others. Tensors that
share memory in eager share a ``Memory``. As long as nothing could tell, each has values of its own, so that reading
a row computes a row; as soon as something could (a view that has no rule, a write, a NumPy array), the values of all
are views of one.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from .algebra import ClassTensor, Head
from .eager import EMIT, dense
from .operands import Operands
from .places import by_run, in_common, laid_out, placed, write
from .readers import Reader, Statistics
from .report.chain import Applied, Way
from .report.records import Site, journal
from .report.source import caller

MOST_GIVEN = 64  # reads whose entries an output remembers
MOST_PARTS = 256  # that are read one by one before all of it is


@dataclass(frozen=True)
class Given:
    """Entries that a fused op returned. It rounds otherwise than a product, but who compares them must find them there.

    Attributes:
        source: what they are entries of.
        index: their classes ``[N, K]``; negative for none.
        values: ``[N, K]``, in the dtype of the source.
        bound: 1 where no other entry of the row may be larger, -1 where none may be smaller, else 0.
        chosen: how they were chosen; None for those of an index.
    """

    source: ClassTensor
    index: Tensor
    values: Tensor
    bound: int
    chosen: Any = None

    @classmethod
    def by(cls, reader: Reader, stats: Statistics, index: Tensor | None) -> Given:
        """What ``reader`` returns of ``stats``."""
        assert reader.entries is not None
        values = reader.entries(EMIT, stats).detach().to(reader.source.dtype)
        index = stats.argmax if reader.want_top else index
        assert index is not None
        bound, chosen = int(reader.want_top), reader.chosen or reader.want_top or None
        if reader.chosen is not None:
            _, largest, _ = reader.chosen
            bound = 1 if largest else -1
        shape = values.shape[0], max(1, values.numel() // max(1, values.shape[0]))  # of no rows, too
        return cls(reader.source, index.reshape(shape), values.reshape(shape), bound, chosen)

    def is_of(self, described: ClassTensor) -> bool:
        mine = self.source
        alike = type(mine) is type(described) and mine.dtype == described.dtype and mine.factor == described.factor
        return alike and mine.has_logits_of(described)

    def is_again(self, other: Given) -> bool:
        """Whether they are the same entries as ``other``, which gives the same values."""
        return self.chosen is not None and self.chosen == other.chosen and self.is_of(other.source)

    def put_into(self, values: Tensor) -> Tensor:
        """``values`` of the source with them in their places, changed in place if they can be."""
        if any(stride == 0 and size > 1 for size, stride in zip(values.shape, values.stride(), strict=True)):
            values = values.clone()
        rows = values.movedim(self.source.class_dim, -1)
        if self.bound:
            last = (self.values.amin(1) if self.bound > 0 else self.values.amax(1)).view(*rows.shape[:-1], 1)
            last = torch.where(last == last, last, self.bound * float("inf"))
            _ = rows.clamp_(max=last) if self.bound > 0 else rows.clamp_(min=last)
        for index, given in zip(self.index.unbind(1), self.values.unbind(1), strict=True):
            at, one = index.view(*rows.shape[:-1], 1), given.view(*rows.shape[:-1], 1)
            there = at.clamp(min=0)
            rows.scatter_(-1, there, torch.where(at < 0, rows.gather(-1, there), one))
        return values


Described = ClassTensor | tuple[ClassTensor, ...]


def parts_of(described: Described) -> tuple[ClassTensor, ...]:
    return described if isinstance(described, tuple) else (described,)


class _Normaliser:
    """What normalises rows, as it was returned. To take it for that is to send no gradient through it."""

    def __init__(self, reader: Reader, tensor: Tensor) -> None:
        self.reader = reader
        self.used: Tensor | None = None  # itself, once it was taken for that: it may die, and its hooks live on
        self._values = tensor.detach().clone()
        self._version, self._grad_fn = tensor._version, tensor.grad_fn
        self._hooks = _hooks(tensor)

    def is_still(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is what it was, to autograd and behind its back."""
        if self.is_watched(tensor) or tensor.grad_fn is not self._grad_fn or tensor._version != self._version:
            return False
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            return True  # nothing may wait for the device
        return torch.equal(tensor, self._values)

    def is_watched(self, tensor: Tensor) -> bool:
        """Whether something waits for its gradient."""
        return tensor.retains_grad or _hooks(tensor) != self._hooks


def _hooks(tensor: Tensor) -> int:
    return len(tensor._backward_hooks or ())


@dataclass(eq=False)
class Origin:
    """What all tensors share that come from one output of one call.

    Attributes:
        site: the head, for the report.
        operands: of the projection.
        memory: the option ``fxfuse.memory``.
        weight: the number of the parameter that the logits are made of, for the report; None if it is none.
        hooked: something waits for the gradient of one of them, so that all gradients must pass through it.
        bypassed: a fused op has read one of them, and its gradients do not pass through any.
        signals: hooks that are to be called when a backward pass comes here, whatever its gradient is.
        lock: held while values are made.
        log_sum_exps: of rows that a fused op has read, by which rows of which logits they are; with what these are
            selected and scaled by.
        way: how the output came to be, for the report; None where that is not known.
        normalisers: what was read that normalises rows.
        given: entries that fused ops have returned.
    """

    site: Site
    operands: Operands
    memory: int
    weight: int | None = None
    hooked: bool = False
    bypassed: bool = False
    signals: list[Callable[[Tensor], Any]] = field(default_factory=list)
    lock: Any = field(default_factory=threading.RLock)
    log_sum_exps: dict[Any, tuple[Tensor, Any]] = field(default_factory=dict)
    way: Way | None = None
    normalisers: Any = field(default_factory=WeakTensorKeyDictionary)
    given: list[Given] = field(default_factory=list)

    def note(self, given: Iterable[Given]) -> None:
        """Remember entries, of so many reads, that a long life does not fill the memory."""
        for new in given:
            self.given = [*(old for old in self.given if not old.is_again(new)), new][-MOST_GIVEN:]

    def remember(self, readers: Sequence[Reader], results: Sequence[Tensor]) -> None:
        """Note what readers returned that normalises rows."""
        for reader, result in zip(readers, results, strict=True):
            if reader.normalises and not result.is_inference():
                self.normalisers[result] = _Normaliser(reader, result)

    def reader_of(self, tensor: Any) -> Reader | None:
        """The reader that returned a tensor, with an axis for the classes; None where that is not known."""
        known = self.normalisers.get(tensor) if isinstance(tensor, Tensor) else None
        if known is None or not known.is_still(tensor) or tensor.dim() != len(known.reader.source.shape):
            return None
        if tensor.requires_grad:  # else nothing can wait for its gradient
            known.used = tensor
        return known.reader

    def waits_for_gradients(self) -> bool:
        """Whether something waits for the gradient of one of them, or of what was taken for their normaliser."""
        used = (known for known in self.normalisers.values() if known.used is not None)
        return self.hooked or any(known.is_watched(known.used) for known in used)

    @property
    def head(self) -> str:
        """``file.py:line`` of the projection."""
        return self.way.projection.where if self.way else self.site.where


@dataclass(eq=False)
class Memory:
    """What tensors share that have one memory in eager: the one that owns it, and whether theirs must be one too.

    Every view leads to the owner, which leads here: not back, so that all goes at once when the last tensor does.
    """

    owner: weakref.ref[State]
    one: bool = False
    views: list[weakref.ref[State]] = field(default_factory=list)
    made_of_it: list[weakref.ref[State]] = field(default_factory=list)

    def holders(self) -> int:
        """How many tensors there are that have it, or are waited for by others."""
        return sum(view() is not None for view in self.views)


def _with(known: list[weakref.ref[State]], another: weakref.ref[State]) -> list[weakref.ref[State]]:
    return [*(state for state in known if state() is not None), another]


@dataclass(eq=False)
class State:
    """What a ``DeferredLogits`` knows besides what every tensor does.

    It must not lead to the tensor's node in the graph of autograd, which may lead to it.

    Attributes:
        meta: a tensor without data of the same shape, strides and dtype.
        thunk: the operator and its arguments that make it of others (states in their place); None for an output.
        is_view: whether that operator returns a view.
        described: what it is, where rules can tell; several that are stacked along a first axis.
        values: all of it, once they were needed.
        calls: the functions that it went through since the graph returned it, for the report.
        others: origins that it comes from as well, where it is made of several outputs.
    """

    origin: Origin
    meta: Tensor
    thunk: tuple[Any, ...] | None = None
    is_view: bool = False
    described: Described | None = None
    values: Tensor | None = None
    calls: tuple[Applied, ...] = ()
    others: tuple[Origin, ...] = ()
    memory: Memory = field(init=False)

    def __post_init__(self) -> None:
        me, parents = weakref.ref(self), () if self.thunk is None else tuple(self._parents())
        self.memory = parents[0].memory if self.is_view and parents else Memory(me)
        self.memory.views = _with(self.memory.views, me)
        for part in () if self.is_view else parents:
            part.memory.made_of_it = _with(part.memory.made_of_it, me)

    @property
    def origins(self) -> tuple[Origin, ...]:
        """All that it comes from."""
        return (self.origin, *self.others)

    def read(self) -> Tensor:
        """The values, perhaps in memory of their own."""
        with self._locked():
            if self.memory.one:
                return self._viewed()
            if self.values is None:
                with torch.inference_mode(False), torch.no_grad():
                    self.values = self._build_beside()
                    for view in self._views():
                        if view.values is not None:
                            write(view.values, view._viewed())
                        for given in view._given():
                            _ = given.put_into(view._viewed())
                    for given in self._given():
                        self.values = given.put_into(self.values)
                if self.thunk is None:
                    self.origin.operands.are_read()
                elif not self.is_view:
                    self.thunk = ()  # what it was made of may go
            return self.values

    def share(self) -> Tensor:
        """The values in the memory that every view of it has."""
        with self._locked():
            if not self.memory.one:
                owner = self._owner()
                values = owner.read()
                with torch.inference_mode(False), torch.no_grad():
                    owner.values = placed(values, owner.meta)
                # Copies that wait can no longer be made of these values, which may be written to.
                stale = self.origin.operands.are_stale()
                for state in filter(None, (waiting() for waiting in self.memory.made_of_it)):
                    if stale or state.described is None:
                        state.read()
                self.memory.one = True
                self.origin.operands.are_wanted()
            return self._viewed()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        # All in one order, before the locks of what it is made of: two threads may read what shares two origins.
        with contextlib.ExitStack() as held:
            for origin in sorted(self.origins, key=id):
                held.enter_context(origin.lock)
            yield

    def is_built(self) -> bool:
        """Whether the values can be had without a product."""
        if self.values is not None or self.memory.one:
            return True
        return bool(self.thunk) and all(p.is_built() and not p.memory.one for p in self._parents())

    # What was computed of a part of the rows must not change when others are: a larger product may round otherwise, and
    # the gradient of ``amax``, say, looks for its result among the values that it was taken of.

    def _owner(self) -> State:
        owner = self.memory.owner()
        assert owner is not None
        return owner

    def _views(self) -> list[State]:
        """The views of it that there are, if it is the owner of its memory."""
        views = [view() for view in self.memory.views] if self is self.memory.owner() else []
        return [view for view in views if view is not None and view is not self]

    def _given(self) -> list[Given]:
        described = self.described
        return [g for g in self.origin.given if isinstance(described, ClassTensor) and g.is_of(described)]

    def _build_beside(self) -> Tensor:
        """``_build``, with what it has in common with views that were read before."""
        alone = self is not self.memory.owner() and not self.is_built()
        read = [view for view in self._owner()._views() if view.values is not None] if alone else []
        common = [in_common(self.meta, view.meta) for view in read] if len(read) <= MOST_PARTS else [None]
        if None in common:
            self._owner().read()  # and this is a part of that
            return self._build()
        values = self._build()
        for view, runs in zip(read, common, strict=True):
            if runs and view.values is not None:
                by_run(values, self.meta)[runs[0]] = by_run(view.values, view.meta)[runs[1]]
        return values

    def _parents(self) -> Iterator[State]:
        return (part for part in tree_iter(self.thunk) if isinstance(part, State))

    def _viewed(self) -> Tensor:
        if self is self.memory.owner():
            assert self.values is not None
            return self.values
        assert self.thunk
        function, args, kwargs = tree_map_only(State, State._viewed, self.thunk)
        return function(*args, **kwargs)

    def _build(self) -> Tensor:
        whole = all(parent.meta.numel() == self.meta.numel() for parent in self._parents())
        # As eager does it, unless a part of the rows is all that is needed.
        if self._is_replayable() and (whole or self.is_built() or self.described is None):
            assert self.thunk
            function, args, kwargs = tree_map_only(State, State.read, self.thunk)
            # What autocast converts it has converted already, where eager did.
            with torch.autocast(self.origin.operands.head.input.device.type, enabled=False):
                return function(*args, **kwargs)
        if self.described is None:
            raise AssertionError("an intermediate of deferred logits is read after they were written to")
        return self._project(self.described)

    def _is_replayable(self) -> bool:
        """Whether what it is made of can be had as it was then."""
        return bool(self.thunk) and all(
            not p.memory.one and (p.values is not None or p.described is not None or p._is_replayable())
            for p in self._parents()
        )

    def _project(self, described: Described) -> Tensor:
        parts = [dense(part.with_heads(as_they_were(self.origins, part))) for part in parts_of(described)]
        values = torch.stack(parts) if isinstance(described, tuple) else parts[0]
        origin = self.origin
        journal.note("read", origin.site, origin.weight, origin.head, caller(), values.nbytes)
        return laid_out(values, self.meta)


def as_they_were(origins: Iterable[Origin], described: ClassTensor) -> Callable[[Head], Head]:
    """The heads of ``described``, of which each is that of one of ``origins``, with operands for its values.

    Raises:
        StaleLogitsError: an operand of one of them is not what it was.
    """
    operands = {origin.operands.head: origin.operands for origin in origins}
    return {head: operands[head].as_they_were() for head in described.heads()}.__getitem__
