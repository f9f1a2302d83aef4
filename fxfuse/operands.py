"""The operands of logits that nobody has computed yet, and whether they are still what they were.

Eager computed its logits at once, so what is computed later must be of the same operands. An optimizer's step is
waited for: a weight that it is about to change is copied first. Any other change is noticed when the logits are read.
"""

from __future__ import annotations

import functools
import inspect
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_pre_hook

from . import compat, errors
from .algebra import Head
from .living import Living
from .seals import BEHIND, IN_PLACE, Difference, Samples, Seal, is_gone

_FEW_BYTES = 1 << 15  # that take a CPU less time to copy than to take a sample of
_living: Living[Operands] = Living()


class Trained:
    """The operands of logits as autograd knows them.

    It is the graph that keeps this, and what fused reads left for later ones (see ``origin.Origin``), so that logits
    which were detached from it do not keep the graph, with all that was saved for the backward of the hidden states.
    """

    def __init__(self, head: Head) -> None:
        self.log_sum_exps: dict[Any, Any] = {}
        self.used: list[Any] = []
        self.originals = _operands_of(head)
        self._known_to_autograd = self._to_autograd()
        # Those that require no gradient now will not get one later.
        cut_off = {name: t.detach() for name, t in self.originals.items() if not t.requires_grad}
        self.head = head.of(**cut_off) if cut_off else head

    def lead_where_they_did(self) -> bool:
        """Whether gradients to the operands go where eager's do: to what these were made of, and whether any did, then.

        A parameter may have been frozen since, or hidden states detached in place.
        """
        return self._to_autograd() == self._known_to_autograd

    def _to_autograd(self) -> list[tuple[bool, Any]]:
        return [(t.requires_grad, t.grad_fn if t.requires_grad else None) for t in self.originals.values()]


def _operands_of(head: Head) -> dict[str, Any]:
    operands = {"input": head.input, "weight": head.weight}
    return operands if head.bias is None else {**operands, "bias": head.bias}


class Operands:
    """A head with the seals of its operands. Equal only to itself.

    Attributes:
        head: the operands, for values: no gradient flows to the hidden states.
        size: the bytes of the logits.
        lock: held while something is computed from them or of the logits, and while they are copied for a step, which
            waits for another thread that reads logits which nothing had read.
        stream: makes the CUDA stream on which eager computes the logits; None elsewhere.
    """

    size = 0
    stream: Callable[[], torch.cuda.Stream] | None = None
    _in_capture = False
    _is_read = False
    _trained: weakref.ref[Trained] | None = None
    _logits: weakref.ref[Any] | None = None
    _user: weakref.ref[Any] | None = None
    _looked: Sequence[tuple[list[str], Difference]] = ()  # since the last read began
    _looked_at_copy: Mapping[str, Difference] = types.MappingProxyType({})

    def __init__(self, head: Head, exposed: bool, where: str, on_copy: Callable[[int], None]) -> None:
        """
        Args:
            head: its operands are as they are when eager computes the logits.
            exposed: whether others may write to the hidden states, so that they must be copied now.
            where: ``file.py:line`` of the projection.
            on_copy: called with the bytes of each copy of a weight.
        """
        self._on_copy = on_copy
        self._where = where
        input = head.input.detach()  # which has its version
        operands = _operands_of(head)
        operands["input"] = input
        # Logits would keep all of the memory that hidden states of a few tokens are a part of.
        is_part = input.untyped_storage().nbytes() > 2 * input.nbytes
        copied = exposed or is_part or (input.is_cpu and input.nbytes <= _FEW_BYTES)
        # And what is negated when it is read is not where PyTorch has called ``__torch_dispatch__``.
        self._exposed = {n: t.detach().clone() for n, t in operands.items() if t.is_neg() or (copied and n == "input")}
        self._copies = self._exposed.copy()
        self._seals = {name: Seal(t) for name, t in operands.items()}
        # What is copied as a whole needs none.
        self._samples = Samples({name: t for name, t in operands.items() if name not in self._exposed})
        operands.update(self._exposed)
        self._originals = operands
        without_gradient = {n: t if n == "input" else t.detach() for n, t in operands.items() if not t.requires_grad}
        self.head = head.of(**without_gradient)
        self.lock = threading.RLock()
        if input.is_cuda:
            self.stream = compat.current_stream(input.device)
            self._in_capture = torch.cuda.is_current_stream_capturing()
        _watch.begin()
        _living.track(self)
        _watch.now()

    def as_they_were(self) -> Head:
        """The head with copies in the place of operands that have been copied: for values, not for gradients.

        What the device has yet to say about them ``were_not_written_to`` waits for: until then nothing may be made
        known that is computed from the head.

        Raises:
            StaleLogitsError: another operand is not what it was, or would not be in a replay of what is captured.
        """
        if self.stream is not None and torch.cuda.is_current_stream_capturing() and not self._in_capture:
            raise errors.read_in_capture(self._where)
        there = self._there()
        for name, tensor in there.items():
            if how := self._seals[name].broken(tensor):
                raise errors.stale_logits(name, how, self._where)
        at_copy = [([name], difference) for name, difference in self._looked_at_copy.items()]
        self._looked = [([*there], self._samples.difference(there)), *at_copy]
        self._refuse_differences(Difference.is_known)
        copies: dict[str, Any] = self._copies
        return self.head.of(**copies)

    def were_not_written_to(self) -> None:
        """For the end of what is computed from them: another thread may have begun to change them meanwhile.

        Raises:
            StaleLogitsError: it has, or one was not what it was in the beginning.
        """
        for name, tensor in self._there().items():
            if self._seals[name].is_written_to(tensor):
                raise errors.stale_logits(name, IN_PLACE, self._where)
        self._refuse_differences()

    def _refuse_differences(self, among: Callable[[Difference], bool] | None = None) -> None:
        for names, difference in self._looked:
            if (among is None or among(difference)) and difference.is_there():
                raise errors.stale_logits(self._first_different(names), BEHIND, self._where)

    def _first_different(self, names: list[str]) -> str:
        """Which of these it is, if it is one of these."""
        there, (*others, last) = self._there(), names
        different = (n for n in others if n in there and self._samples.difference({n: there[n]}).is_there())
        return next(different, last)

    def are_stale(self) -> bool:
        """Whether the logits cannot be computed any more."""
        there = self._there()
        if any(self._seals[name].broken(tensor) for name, tensor in there.items()):
            return True
        return any(one.is_there() for one in (self._samples.difference(there), *self._looked_at_copy.values()))

    def _there(self) -> dict[str, Tensor]:
        """The operands of which there are no copies."""
        return {name: t for name, t in self._as_others_have_them().items() if name not in self._copies}

    def _as_others_have_them(self) -> dict[str, Any]:
        """The operands, of which the memory may have been replaced; of the hidden states only while gradients flow."""
        trained = self.trained()
        return self._originals if trained is None else trained.originals

    def trained(self) -> Trained | None:
        """The same as autograd knows them, as long as gradients can come to the logits."""
        return None if self._trained is None else self._trained()

    def are_copied(self) -> bool:
        """Whether an operand was changed and there is a copy of it, through which no gradient flows."""
        originals = self._as_others_have_them()
        copies = ((name, copy) for name, copy in self._copies.items() if copy is not originals[name])
        return any(self._seals[name].is_broken(originals[name], copy) for name, copy in copies)

    def trained_by(self, trained: Trained) -> None:
        """These are the operands for gradients too, as long as something keeps ``trained``."""
        self._trained = weakref.ref(trained)

    def for_gradients(self) -> Head | None:
        """The head through which gradients flow where eager's do; None if they cannot any more."""
        trained = self.trained()
        if trained is None:  # none do: what requires one began to after it was detached
            return self.head
        return trained.head if trained.lead_where_they_did() else None

    def are_of(self, size: int, logits: weakref.ref[Any], user: Any) -> None:
        """Their logits have so many bytes, and are what the ``logits``' method ``read`` computes.

        They are needed as long as ``user.needs_operands()``.
        """
        self.size, self._logits, self._user = size, logits, weakref.ref(user)

    def have_logits(self) -> bool:
        """Whether the logits can still be read as a whole."""
        return self._logits is not None and self._logits() is not None

    def are_detached(self) -> bool:
        """Whether no gradient can come to the logits that there are."""
        return self.trained() is None

    def read(self) -> bool:
        """Compute the logits; False if nobody has them any more."""
        logits = None if self._logits is None else self._logits()
        if logits is not None:
            logits.read()
        return logits is not None

    def are_read(self) -> None:
        """From now on the logits exist: no copy is needed, but of what others may write to."""
        self._is_read = True
        self._copies = dict(self._exposed)
        self._looked_at_copy = {}

    def are_unread(self) -> bool:
        """Whether something may be computed from them."""
        return not self._is_read

    def are_wanted(self) -> None:
        """Undo ``are_read``: something has to be computed from them again."""
        self._is_read = False

    def are_needed(self) -> bool:
        """Whether something will be computed from them: what would have been may be gone."""
        if self._user is None:
            return True
        user = self._user()
        return user is not None and bool(user.needs_operands())

    def weight_to_keep(self, storages: set[int | None]) -> Tensor | None:
        """The weight, or the copy of it, if it lies in ``storages``, which are about to change."""
        weight = self._originals["weight"]
        return self._copies.get("weight", weight) if compat.storage(weight) in storages else None

    def keep(self, storages: set[int | None], copies: dict[int, Tensor]) -> None:
        """Copy the operands that lie in ``storages``, unless the logits have been read: by another thread, perhaps."""
        with self.lock:
            for name, seal in self._seals.items():
                tensor = self._originals[name]
                if name in self._copies:
                    continue
                # What FSDP has gathered, it will gather again, of the shards that the step changes.
                seal.was_gone |= is_gone(tensor)
                if compat.storage(tensor) not in storages:
                    continue
                if self._is_read:
                    seal.is_open |= seal.is_of(tensor)
                    continue
                if seal.broken(tensor):
                    continue  # what has changed already is too late to copy; reading says so
                self._looked_at_copy = {**self._looked_at_copy, name: self._samples.difference({name: tensor})}
                if id(tensor) not in copies:
                    copies[id(tensor)] = tensor.detach().clone()
                    self._on_copy(copies[id(tensor)].nbytes)
                self._copies[name] = copies[id(tensor)]
                seal.is_open = True


@torch._dynamo.disable(reason=errors.STEP_NOT_TRACEABLE)
def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    """Copy what the step is about to change; what its closure will make too, once that has."""
    _copy(optimizer)

    def then_copy(closure: Any) -> Any:
        if not callable(closure):
            return closure

        @functools.wraps(closure)
        def call(*args: Any, **kwargs: Any) -> Any:
            loss = closure(*args, **kwargs)
            _copy(optimizer)
            return loss

        return call

    if "closure" in kwargs:
        return args, {**kwargs, "closure": then_copy(kwargs["closure"])}
    return ((*args[:1], then_copy(args[1]), *args[2:]), kwargs) if len(args) > 1 else None


def _copy(optimizer: torch.optim.Optimizer) -> None:
    living = _living.all()
    for operands in living:
        if not operands.are_needed():
            operands.are_read()
    if not living:
        return
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    storages = {compat.storage(p) for p in parameters if not is_lazy(p)}
    copies: dict[int, Tensor] = {}
    with compat.modes_set_aside():
        _read_small([operands for operands in living if operands.are_unread()], storages)
        for operands in living:
            operands.keep(storages, copies)


def _read_small(waiting: list[Operands], storages: set[int | None]) -> None:
    """Compute the logits of those whose logits were detached and take no more memory than a copy.

    Such are kept to be read later, step after step perhaps, each of which would have a copy of the weight.
    """
    users: dict[int, list[Operands]] = {}
    sizes: dict[int, int] = {}
    for operands in waiting:
        weight = operands.weight_to_keep(storages)
        if weight is not None:
            users.setdefault(id(weight), []).append(operands)
            sizes[id(weight)] = weight.nbytes
    for key, some in users.items():
        small = sum(one.size for one in some) <= sizes[key] and all(map(Operands.are_detached, some))
        if small and not any(map(Operands.are_stale, some)):
            for one in some:
                one.read()


class _Watch:
    """Of the steps of all optimizers: once there is something to copy for, and not before, for the hook breaks the
    graph of a step that is compiled.
    """

    def __init__(self) -> None:
        self._begun = False
        self._unseen: weakref.ref[torch.optim.Optimizer] | None = None  # in the closure of whose step it was begun

    def begin(self) -> None:
        if not self._begun:
            self._begun = True
            self._unseen = next((weakref.ref(optimizer) for optimizer in _stepping()), None)
            register_optimizer_step_pre_hook(_before_step)

    def now(self) -> None:
        """Copy what a step that began before the hook is about to change."""
        if self._unseen is None:
            return
        optimizer = self._unseen()
        if optimizer is not None and any(optimizer is one for one in _stepping()):
            _copy(optimizer)
        else:
            self._unseen = None


def _stepping() -> Iterator[torch.optim.Optimizer]:
    """The optimizers whose steps are under way in this thread, told by the frames that call their hooks."""
    frame = inspect.currentframe()
    while frame is not None:
        here = frame.f_globals.get("__name__") == torch.optim.Optimizer.__module__
        if here and "pre_hook" in frame.f_code.co_varnames:
            optimizer = frame.f_locals.get("self")
            if isinstance(optimizer, torch.optim.Optimizer):
                yield optimizer
        frame = frame.f_back


_watch = _Watch()
