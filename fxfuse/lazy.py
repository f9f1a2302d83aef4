"""The values of deferred logits: how they come to be, once, when something needs them.

A ``State`` stands for one tensor: what it is (``described``), or what operator makes it of which others. Tensors that
share memory in eager share a ``Memory``. As long as nothing could tell, each has values of its own, so that reading
a row computes a row; as soon as something could (a view that has no rule, a write, a NumPy array), the values of all
are views of one.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import compat, trees
from .algebra import ClassTensor, Head
from .eager import dense
from .living import Living
from .origin import Given, Origin, join, locked, working
from .places import along, in_common, laid_out, placed, put_runs, take_runs, write
from .report.chain import Applied
from .report.records import journal
from .report.source import caller

MOST_PARTS = 64  # that are read one by one before all of it is


Described = ClassTensor | tuple[ClassTensor, ...]


def parts_of(described: Described) -> tuple[ClassTensor, ...]:
    return described if isinstance(described, tuple) else (described,)


@dataclass(eq=False)
class Memory:
    """What tensors share that have one memory in eager: whether theirs must be one too.

    Of all its ``views`` some are ``built``: they have values, of their own unless it must be one.

    Every view leads to what it is a view of, and here; nothing leads back, so that all goes at once when the last
    tensor does.
    """

    one: bool = False
    views: Living[State] = field(default_factory=Living)

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
        parents: those others.
        is_view: whether that operator returns a view.
        described: what it is, where rules can tell; several that are stacked along a first axis.
        values: all of it, once they were needed.
        calls: the functions that it went through since the graph returned it, for the report.
        others: origins that it comes from as well, where it is made of several outputs.
        origins: all that it comes from.
    """

    origin: Origin
    meta: Tensor
    thunk: tuple[Any, ...] | None = None
    parents: tuple[State, ...] = ()
    is_view: bool = False
    described: Described | None = None
    values: Tensor | None = None
    calls: tuple[Applied, ...] = ()
    others: tuple[Origin, ...] = ()
    origins: tuple[Origin, ...] = field(init=False)
    memory: Memory = field(init=False)

    def __post_init__(self) -> None:
        self.origins = (self.origin, *self.others)
        if self.thunk is None:  # nobody else knows the output yet
            self.memory = Memory()
            self.memory.views.track(self)
            return
        self.memory = self.parents[0].memory if self.is_view else Memory()
        with locked(self.origins):
            if self.others:
                join(self)
            self.memory.views.track(self)
            for origin in self.origins:
                origin.derived[id(self)] = self
            for part in () if self.is_view else self.parents:
                part.memory.made_of_it.add(self)

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of the tensor has values, and needs no more: ``async_save`` copies tensors, then their attributes."""

    def read(self) -> Tensor:
        """The values, perhaps in memory of their own."""
        with compat.modes_set_aside(), working(self.origins) as here:
            return used_on(here, self._read())

    def _read(self) -> Tensor:
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
                self.thunk = self.parents = ()  # what it was made of may go
            for origin in self.origins:
                origin.let_operands_go()
        assert self.values is not None
        return self.values

    def _keep(self, values: Tensor) -> Tensor:
        self.values = values
        self.memory.built.add(self)
        return values

    def share(self) -> Tensor:
        """The values in the memory that every view of it has."""
        with compat.modes_set_aside(), working(self.origins) as here:
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
                    for origin in state.origins if state.values is None else ():
                        origin.keep_operands_for(state)
                self.memory.one = True
                for view in self.memory.built - {owner}:
                    view.values = None  # which from now on are those of the owner
            return used_on(here, self._viewed())

    def is_built(self) -> bool:
        """Whether the values can be had without a product."""
        if self.values is not None or self.memory.one:
            return True
        return self._comes_of(lambda parent: parent.values is not None)

    # What was computed of a part of the rows must not change when others are: a larger product may round otherwise, and
    # the gradient of ``amax``, say, looks for its result among the values that it was taken of.

    def _owner(self) -> State:
        state = self
        while state.is_view:
            (state,) = state.parents  # a view is one of one tensor
        return state

    def _given(self) -> list[Given]:
        described = self.described
        return [g for g in self.origin.given if isinstance(described, ClassTensor) and g.is_of(described)]

    def is_read_in_part(self) -> bool:
        """Whether some of its values, at least, are known."""
        with locked(self.origins):
            if self.is_built():
                return True
            return any(in_common(self.meta, other.meta) != () for other in self.memory.built)

    def _build_beside(self) -> Tensor:
        """``_build``, with the values and entries that others have which share its memory, and its own entries."""
        owner = self._owner()
        if self is not owner and self.is_built():
            return self._build()
        built = self.memory.built
        known = [other for other in built if other is not self and built.isdisjoint(other._viewed_states())]
        known += (o for o in self.memory.views.all() if o is not self and o not in built and o._given())
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

    def _viewed_states(self) -> tuple[State, ...]:
        """What it is a view of, whose values, once there are any, are its own."""
        return self.parents if self.is_view else ()

    # What a program writes to hundreds of times is made of as many others: walks over these are loops.

    def _comes_of(self, there: Callable[[State], bool]) -> bool:
        """Whether all that it is made of can be had by operators from what is ``there`` and has not been written to."""
        waiting, seen = [self], {self}
        while waiting:
            state = waiting.pop()
            if not state.thunk:
                return False
            for parent in state.parents:
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
            for parent in state.parents if state._is_replayed() else ():
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
            (state,) = state.parents
        assert owner.values is not None
        values = owner.values
        for view in reversed(views):
            assert view.thunk
            function, args, kwargs = trees.map_only(State, functools.partial(_instead, values), view.thunk)
            values = function(*args, **kwargs)
        return values

    def _is_replayed(self) -> bool:
        """Whether it is made as eager does it, unless a part of the rows is all that is needed."""
        whole = all(parent.meta.numel() == self.meta.numel() for parent in self.parents)
        if not self._is_replayable():
            return False
        if whole or self.is_built() or self.described is None:
            return True
        # Of several outputs one may have values, and its operands have changed since.
        return bool(self.others) and any(origin.operands.are_stale() for origin in self.origins)

    def _build(self) -> Tensor:
        if self._is_replayed():
            assert self.thunk
            function, args, kwargs = trees.map_only(State, State.read, self.thunk)
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
        used = {head for part in parts_of(described) for head in part.heads()}
        for origin in self.origins:
            if origin.operands.head in used:
                origin.operands.were_not_written_to()
                origin.has_values = True
        origin = self.origin
        journal.note("read", origin.site, origin.weight, origin.head, caller(), values.nbytes)
        return laid_out(values, self.meta)


def used_on(stream: torch.cuda.Stream | None, values: Tensor) -> Tensor:
    """The values, whose memory must stay theirs until that stream is done with them."""
    if stream is not None:
        values.record_stream(stream)
    return values


def _instead(values: Tensor, _: State) -> Tensor:
    return values


def as_they_were(origins: Iterable[Origin], described: ClassTensor) -> Callable[[Head], Head]:
    """The heads of ``described``, of which each is that of one of ``origins``, with operands for its values.

    Raises:
        StaleLogitsError: an operand of one of them is not what it was.
    """
    operands = {origin.operands.head: origin.operands for origin in origins}
    return {head: operands[head].as_they_were() for head in described.heads()}.__getitem__
