"""What all tensors share that come from one output of one call: its operands, and what was read of it so far."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from . import compat
from .algebra import ClassTensor
from .eager import EMIT
from .operands import Operands
from .readers import Reader, Statistics
from .report.chain import Way
from .report.records import Site

if TYPE_CHECKING:
    from .lazy import State

MOST_GIVEN = 64  # reads whose entries an output remembers
MOST_USED = 256  # normalisers that are watched for who waits for their gradients
_waiting = threading.RLock()  # for what ``Origin`` lists by identity: taken last, and let go at once


@dataclass(frozen=True)
class Identity:
    """By what logits are known again. It does not keep the tensors that they are made with, and their graph.

    Attributes:
        key: equal for equal ones, as long as these tensors live.
        handles: which they are.
    """

    key: Any
    handles: tuple[weakref.ref[Tensor], ...]

    @classmethod
    def of(cls, described: ClassTensor, key: Any) -> Identity:
        return cls(key, tuple(weakref.ref(handle) for handle in described.handles() if isinstance(handle, Tensor)))

    def is_alive(self) -> bool:
        """Whether the key names what it did: another tensor may be where one was that died."""
        return all(handle() is not None for handle in self.handles)


def _entries_key(described: ClassTensor) -> Any:
    """Equal for tensors with the same entries, one by one."""
    return type(described), described.dtype, described.factor, *described.whole_key()


@dataclass(frozen=True)
class Given:
    """Entries that a fused op returned. It rounds otherwise than a product, but who compares them must find them there.

    Attributes:
        source: what they are entries of.
        class_dim: the axis of the classes there.
        index: their classes ``[N, K]``; negative for none.
        values: ``[N, K]``, in the dtype of the source.
        bound: 1 where no other entry of the row may be larger, -1 where none may be smaller, else 0.
        chosen: how they were chosen; None for those of an index.
    """

    source: Identity
    class_dim: int
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
        source = Identity.of(reader.source, _entries_key(reader.source))
        return cls(source, reader.source.class_dim, index.reshape(shape), values.reshape(shape), bound, chosen)

    def is_of(self, described: ClassTensor) -> bool:
        return self.source.key == _entries_key(described) and self.source.is_alive()

    def is_again(self, other: Given) -> bool:
        """Whether they are the same entries as ``other``, which gives the same values; or of what is gone."""
        return not self.source.is_alive() or (
            self.chosen is not None and self.chosen == other.chosen and self.source.key == other.source.key
        )

    def put_into(self, values: Tensor) -> Tensor:
        """``values`` of the source with them in their places, changed in place if they can be."""
        if any(stride == 0 and size > 1 for size, stride in zip(values.shape, values.stride(), strict=True)):
            values = values.clone()
        _ = self._enter(values.movedim(self.class_dim, -1), self.index, self.values)
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


# By which rows of which logits they are.
LogSumExps = dict[Any, tuple[Statistics, Identity]]


class _Normaliser:
    """What normalises rows, as it was returned. To take it for that is to send no gradient through it."""

    def __init__(self, reader: Reader, tensor: Tensor) -> None:
        self.reader = reader
        self.is_used = False  # was taken for that
        self._values = tensor.detach().clone()
        self._version, self._grad_fn = compat.version(tensor), tensor.grad_fn
        self._hooks = _hooks(tensor)

    def is_still(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is what it was, to autograd and behind its back."""
        changed = tensor.grad_fn is not self._grad_fn or compat.version(tensor) != self._version
        if changed or self.is_watched(tensor):
            return False
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            return self._version is not None  # nothing may wait for the device
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
        factors: hooks of the output that multiply its gradient, or as well one of what was made of it.
        way: how the output came to be, for the report; None where that is not known.
        given: entries that fused ops have returned.
        is_read: the output has values.
        has_values: some were made of the operands, through which gradients may come to what is made of these.
        keeps_gradient: a loss keeps a gradient of the weight for the backward.
        joined: what is made of this output and others.
    """

    site: Site
    operands: Operands
    memory: int
    weight: int | None = None
    hooked: bool = False
    bypassed: bool = False
    signals: list[Callable[[Tensor], Any]] = field(default_factory=list)
    factors: list[Callable[[Tensor], Any]] = field(default_factory=list)
    way: Way | None = None
    given: list[Given] = field(default_factory=list)
    is_read: bool = False
    has_values: bool = False
    keeps_gradient: bool = False
    joined: tuple[weakref.ref[State], ...] = ()

    # Most logits are never read, and what only reading needs takes time to make.

    @functools.cached_property
    def normalisers(self) -> Any:
        """What was read that normalises rows."""
        return WeakTensorKeyDictionary()

    @functools.cached_property
    def log_sum_exps(self) -> LogSumExps:
        """Of rows that a fused op has read for which no gradients are wanted."""
        return {}

    @functools.cached_property
    def used(self) -> list[tuple[_Normaliser, Tensor]]:
        """Of the normalisers, those that were taken for that: they may die, and their hooks live on."""
        return []

    @functools.cached_property
    def projected(self) -> weakref.WeakValueDictionary[int, State]:
        """What can be computed of the operands only, as what it is made of may have been written to; by identity."""
        return weakref.WeakValueDictionary()

    @functools.cached_property
    def derived(self) -> weakref.WeakValueDictionary[int, State]:
        """What was made of the output, by identity."""
        return weakref.WeakValueDictionary()

    def keep_operands_for(self, state: State) -> None:
        """Something will be computed of them, though the output may have values."""
        with _waiting:
            self.projected[id(state)] = state
        self.operands.are_wanted()

    def needs_operands(self) -> bool:
        """Whether something that has no values yet will be computed of them."""
        with _waiting:
            # Lists, as a finaliser may add to them meanwhile.
            waiting, derived = (
                [state for ref in states.valuerefs() if (state := ref()) is not None]
                for states in (self.projected, self.derived)
            )
        if any(state.values is None for state in waiting):
            return True
        # Without values, but gone: what was made of it may have some, and else needs them too.
        return not self.is_read and (self.operands.have_logits() or not all(state.is_built() for state in derived))

    def let_operands_go(self) -> None:
        """Let them change from now on, if nothing needs them any more."""
        if not self.needs_operands():
            self.operands.are_read()

    def log_sum_exps_of(self, grad: bool) -> LogSumExps:
        """Those with or without gradients; those with gradients the graph keeps, not what was detached from it."""
        if not grad:
            return self.log_sum_exps
        trained = self.operands.trained()
        return {} if trained is None else trained.log_sum_exps

    def may_lead_back(self, source: ClassTensor) -> bool:
        """Whether the graph of what ``source`` is made with may lead to these logits' node.

        What the graph keeps must not have such a graph: that would be a cycle through C++, which is never freed.
        """
        handles = (handle for handle in source.handles() if isinstance(handle, Tensor))
        return self.has_values and any(handle.grad_fn is not None for handle in handles)

    def note(self, given: Iterable[Given]) -> None:
        """Remember entries, of so many reads, that a long life does not fill the memory."""
        for new in given:
            self.given = [*(old for old in self.given if not old.is_again(new)), new][-MOST_GIVEN:]

    def remember(self, readers: Sequence[Reader], results: Sequence[Tensor], grad: bool) -> None:
        """Note what readers returned that normalises rows; without ``grad`` no gradient goes through that."""
        for reader, result in zip(readers, results, strict=True):
            if reader.normalises:
                source = replace(reader.source, requires_grad=grad)
                self.normalisers[result] = _Normaliser(replace(reader, source=source), result)

    def reader_of(self, tensor: Any) -> Reader | None:
        """The reader that returned a tensor, with an axis for the classes; None where that is not known."""
        known = self.normalisers.get(tensor) if isinstance(tensor, Tensor) else None
        if known is None or not known.is_still(tensor) or tensor.dim() != len(known.reader.source.shape):
            return None
        if tensor.requires_grad and not known.is_used:  # else nothing can wait for its gradient
            if self.may_lead_back(known.reader.source):
                return None
            used: list[tuple[_Normaliser, Tensor]] = (self.operands.trained() or self).used
            if len(used) == MOST_USED:
                return None
            known.is_used = True
            used.append((known, tensor))
        return known.reader

    def waits_for_gradients(self) -> bool:
        """Whether something waits for the gradient of one of them, or of what was taken for their normaliser."""
        trained = self.operands.trained()
        used = self.used if trained is None else [*self.used, *trained.used]
        return self.hooked or any(known.is_watched(tensor) for known, tensor in used)

    @property
    def head(self) -> str:
        """``file.py:line`` of the projection."""
        return self.way.projection.where if self.way else self.site.where


@contextlib.contextmanager
def locked(origins: Iterable[Origin]) -> Iterator[None]:
    """Hold the locks of the operands of these, of those that something is made of together with them, and so on.

    A write to one output reads what was made of it, which may be made of another one too, so that all of them are taken
    at once, in one order: of threads that write to one each, none waits for what the other has.
    """
    origins = set(origins)
    while True:
        together = _together(origins)
        with _all_of([origin.operands.lock for origin in sorted(together, key=id)]):
            if _together(origins) == together:  # from now on they stay what they are
                yield
                return


def _all_of(locks: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
    """Hold them, one in the other: ``with`` lets no signal's handler raise between taking one and its being let go."""
    return locks[0] if len(locks) == 1 else _one_in_the_other(locks)


@contextlib.contextmanager
def _one_in_the_other(locks: Sequence[Any]) -> Iterator[None]:
    first, *others = locks
    with first, _all_of(others):
        yield


@contextlib.contextmanager
def working(origins: Iterable[Origin]) -> Iterator[torch.cuda.Stream | None]:
    """Hold the locks, and work where eager computed the logits: on another stream, kept values would not be there yet.

    Yields the stream to use the results on, if that is another one: it waits for them at the end.
    """
    origins = tuple(origins)
    stream = origins[0].operands.stream
    with locked(origins):
        if stream is None or torch.cuda.is_current_stream_capturing():
            yield None
            return
        home = stream()
        here = torch.cuda.current_stream(home.device)
        if here == home:
            yield None
            return
        home.wait_stream(here)
        with torch.cuda.stream(home):
            yield here
        here.wait_stream(home)


def _together(origins: set[Origin]) -> set[Origin]:
    if len(origins) == 1 and not next(iter(origins)).joined:
        return origins
    found, waiting = set(origins), list(origins)
    while waiting:
        states = (state for ref in waiting.pop().joined if (state := ref()) is not None)
        new = {origin for state in states for origin in state.origins} - found
        found |= new
        waiting += new
    return found


def join(state: State) -> None:
    """Note that it is made of several outputs, whose locks are held."""
    for origin in state.origins:
        origin.joined = (*(ref for ref in origin.joined if ref() is not None), weakref.ref(state))
