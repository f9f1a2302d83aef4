"""The values of deferred logits: how they come to be, once, when something needs them.

A ``State`` stands for one tensor: what it is (``described``), or what operator makes it of which others. Tensors that
share memory in eager share a ``Memory``. As long as nothing could tell, each has values of its own, so that reading
a row computes a row; as soon as something could (a view that has no rule, a write, a NumPy array), the values of all
are views of one.
"""

from __future__ import annotations

import contextlib
import functools
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
from .places import along, in_common, laid_out, placed, put_runs, take_runs, write
from .readers import Reader, Statistics
from .report.chain import Applied, Way
from .report.records import Site, journal
from .report.source import caller

MOST_GIVEN = 64  # reads whose entries an output remembers
MOST_PARTS = 64  # that are read one by one before all of it is
MOST_USED = 256  # normalisers that are watched for who waits for their gradients


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
        _ = self._enter(values.movedim(self.source.class_dim, -1), self.index, self.values)
        return values

    def put_into_rows(self, rows: Tensor, numbers: Tensor) -> Tensor:
        """The same for some rows ``[n, V]``, of so many: changed in place."""
        at = numbers.to(self.index.device)
        return self._enter(rows, self.index[at], self.values[at])

    def _enter(self, rows: Tensor, index: Tensor, values: Tensor) -> Tensor:
        of_row = *rows.shape[:-1], 1
        if self.bound:
            last = (values.amin(1) if self.bound > 0 else values.amax(1)).view(of_row)
            last = torch.where(last == last, last, self.bound * float("inf"))
            _ = rows.clamp_(max=last) if self.bound > 0 else rows.clamp_(min=last)
        for column, given in zip(index.unbind(1), values.unbind(1), strict=True):
            at, one = column.reshape(of_row), given.reshape(of_row)
            there = at.clamp(min=0)
            rows.scatter_(-1, there, torch.where(at < 0, rows.gather(-1, there), one))
        return rows


_waiting = threading.RLock()  # for ``Origin.projected``: taken last, and let go at once

Described = ClassTensor | tuple[ClassTensor, ...]


def parts_of(described: Described) -> tuple[ClassTensor, ...]:
    return described if isinstance(described, tuple) else (described,)


class _Normaliser:
    """What normalises rows, as it was returned. To take it for that is to send no gradient through it."""

    def __init__(self, reader: Reader, tensor: Tensor) -> None:
        self.reader = reader
        self.is_used = False  # was taken for that
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
        used: of these, those that were taken for that: they may die, and their hooks live on.
        given: entries that fused ops have returned.
        is_read: the output has values.
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
    used: list[tuple[_Normaliser, Tensor]] = field(default_factory=list)
    given: list[Given] = field(default_factory=list)
    is_read: bool = False

    # Most logits are never read, and what only reading needs takes time to make.

    @functools.cached_property
    def normalisers(self) -> Any:
        """What was read that normalises rows."""
        return WeakTensorKeyDictionary()

    @functools.cached_property
    def projected(self) -> weakref.WeakSet[State]:
        """What can be computed of the operands only, as what it is made of may have been written to."""
        return weakref.WeakSet()

    def needs_operands(self) -> bool:
        """Whether something that has no values yet will be computed of them."""
        with _waiting:
            return not self.is_read or any(state.values is None for state in self.projected)

    def let_operands_go(self) -> None:
        """Let them change from now on, if nothing needs them any more."""
        if not self.needs_operands():
            self.operands.are_read()

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
        if tensor.requires_grad and not known.is_used:  # else nothing can wait for its gradient
            if len(self.used) == MOST_USED:
                return None
            known.is_used = True
            self.used.append((known, tensor))
        return known.reader

    def waits_for_gradients(self) -> bool:
        """Whether something waits for the gradient of one of them, or of what was taken for their normaliser."""
        return self.hooked or any(known.is_watched(tensor) for known, tensor in self.used)

    @property
    def head(self) -> str:
        """``file.py:line`` of the projection."""
        return self.way.projection.where if self.way else self.site.where


@dataclass(eq=False)
class Memory:
    """What tensors share that have one memory in eager: the one that owns it, and whether theirs must be one too.

    Of all its ``views`` some are ``built``: they have values, of their own unless it must be one.

    Every view leads to the owner, which leads here: not back, so that all goes at once when the last tensor does.
    """

    owner: weakref.ref[State]
    one: bool = False
    views: weakref.WeakSet[State] = field(default_factory=weakref.WeakSet)

    @functools.cached_property
    def built(self) -> weakref.WeakSet[State]:
        """The views that have values."""
        return weakref.WeakSet()

    @functools.cached_property
    def made_of_it(self) -> weakref.WeakSet[State]:
        """What is made of one of them and has memory of its own."""
        return weakref.WeakSet()

    def holders(self) -> int:
        """How many tensors there are that have it, or are waited for by others."""
        return len(self.views)


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
        parents = () if self.thunk is None else tuple(self._parents())
        self.memory = parents[0].memory if self.is_view and parents else Memory(weakref.ref(self))
        with self.origin.lock:
            self.memory.views.add(self)
        for part in () if self.is_view else parents:
            with part.origin.lock:
                part.memory.made_of_it.add(self)

    def _waits_for_operands(self) -> None:
        for origin in self.origins:
            with _waiting:
                origin.projected.add(self)
            origin.operands.are_wanted(origin)

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
                for state in self._replayed():
                    state.read()
                with torch.inference_mode(False), torch.no_grad():
                    self._keep(self._build_beside())
                if self.thunk is None:
                    self.origin.is_read = True
                elif not self.is_view:
                    self.thunk = ()  # what it was made of may go
                for origin in self.origins:
                    if self.thunk is None or self in origin.projected:
                        origin.let_operands_go()
            assert self.values is not None
            return self.values

    def _keep(self, values: Tensor) -> Tensor:
        self.values = values
        self.memory.built.add(self)
        return values

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
                for state in list(self.memory.made_of_it):
                    if stale or state.described is None:
                        state.read()
                    if state.values is None:
                        state._waits_for_operands()
                self.memory.one = True
                for view in self.memory.built - {owner}:
                    view.values = None  # which from now on are those of the owner
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
        return self._comes_of(lambda parent: parent.values is not None)

    # What was computed of a part of the rows must not change when others are: a larger product may round otherwise, and
    # the gradient of ``amax``, say, looks for its result among the values that it was taken of.

    def _owner(self) -> State:
        owner = self.memory.owner()
        assert owner is not None
        return owner

    def _given(self) -> list[Given]:
        described = self.described
        return [g for g in self.origin.given if isinstance(described, ClassTensor) and g.is_of(described)]

    def is_read_in_part(self) -> bool:
        """Whether some of its values, at least, are known."""
        with self._locked():
            if self.is_built():
                return True
            return any(in_common(self.meta, other.meta) != () for other in self.memory.built)

    def _build_beside(self) -> Tensor:
        """``_build``, with the values and entries that others have which share its memory, and its own entries."""
        owner = self._owner()
        if self is not owner and self.is_built():
            return self._build()
        known = [other for other in self.memory.built if other is not self]
        known += (other for other in self.memory.views - self.memory.built if other is not self and other._given())
        if self is owner:
            values = self._keep(self._build())  # of which the others are views
            for other in known:
                if other.values is not None:
                    write(other.values, other._viewed())
                else:
                    other._put_given_into(other._viewed())
            return self._put_given_into(values)
        common = [in_common(self.meta, other.meta) for other in known] if len(known) <= MOST_PARTS else [None]
        if None in common or not all(other.values is not None or other._has_runs_of_classes() for other in known):
            owner.read()  # and this is a part of that
            return self._build()
        values = self._build()
        for other, runs in zip(known, common, strict=True):
            if runs:
                mine, its = runs
                put_runs(values, self.meta, mine, other._known(its, take_runs(values, self.meta, mine)))
        return self._put_given_into(values)

    def _put_given_into(self, values: Tensor) -> Tensor:
        for given in self._given():
            values = given.put_into(values)
        return values

    def _known(self, numbers: Tensor, values: Tensor) -> Tensor:
        """What is known of the runs of so many ``numbers``, whose ``values [n, …]`` are otherwise as they are."""
        if self.values is not None:
            return take_runs(self.values, self.meta, numbers)
        for given in self._given():
            values = given.put_into_rows(values, numbers)
        return values

    def _has_runs_of_classes(self) -> bool:
        return isinstance(self.described, ClassTensor) and along(self.meta) == self.described.class_dim

    def _parents(self) -> Iterator[State]:
        return (part for part in tree_iter(self.thunk) if isinstance(part, State))

    # What a program writes to hundreds of times is made of as many others: walks over these are loops.

    def _comes_of(self, there: Callable[[State], bool]) -> bool:
        """Whether all that it is made of can be had by operators from what is ``there`` and has not been written to."""
        waiting, seen = [self], {self}
        while waiting:
            state = waiting.pop()
            if not state.thunk:
                return False
            for parent in state._parents():
                if parent.memory.one:
                    return False
                if parent not in seen and not there(parent):
                    seen.add(parent)
                    waiting.append(parent)
        return True

    def _replayed(self) -> list[State]:
        """What ``_build`` reads that was not read yet, after what that is built of itself."""
        found, waiting = [], [self]
        seen = {self}
        while waiting:
            state = waiting.pop()
            for parent in state._parents() if state._is_replayed() else ():
                if parent.values is None and parent not in seen:
                    seen.add(parent)
                    waiting.append(parent)
                    found.append(parent)
        return found[::-1]

    def _viewed(self) -> Tensor:
        views: list[State] = []
        state, owner = self, self._owner()
        while state is not owner:
            views.append(state)
            (state,) = state._parents()  # a view is one of one tensor
        assert owner.values is not None
        values = owner.values
        for view in reversed(views):
            assert view.thunk
            function, args, kwargs = tree_map_only(State, functools.partial(_instead, values), view.thunk)
            values = function(*args, **kwargs)
        return values

    def _is_replayed(self) -> bool:
        """Whether it is made as eager does it, unless a part of the rows is all that is needed."""
        whole = all(parent.meta.numel() == self.meta.numel() for parent in self._parents())
        if not self._is_replayable():
            return False
        # Of several outputs one may have values, and its operands have changed since.
        stale = bool(self.others) and any(origin.operands.are_stale() for origin in self.origins)
        return whole or self.is_built() or self.described is None or stale

    def _build(self) -> Tensor:
        if self._is_replayed():
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
        return self._comes_of(lambda parent: parent.values is not None or parent.described is not None)

    def _project(self, described: Described) -> Tensor:
        parts = [dense(part.with_heads(as_they_were(self.origins, part))) for part in parts_of(described)]
        values = torch.stack(parts) if isinstance(described, tuple) else parts[0]
        origin = self.origin
        journal.note("read", origin.site, origin.weight, origin.head, caller(), values.nbytes)
        return laid_out(values, self.meta)


def _instead(values: Tensor, _: State) -> Tensor:
    return values


def as_they_were(origins: Iterable[Origin], described: ClassTensor) -> Callable[[Head], Head]:
    """The heads of ``described``, of which each is that of one of ``origins``, with operands for its values.

    Raises:
        StaleLogitsError: an operand of one of them is not what it was.
    """
    operands = {origin.operands.head: origin.operands for origin in origins}
    return {head: operands[head].as_they_were() for head in described.heads()}.__getitem__
