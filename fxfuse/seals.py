"""What shows that a tensor was written to, behind autograd's back too."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from . import compat
from .originals import original_or_itself

# One for each class of a vocabulary, and neighbours. Reading far apart is what they cost: microseconds on a GPU, a few
# ns each on a CPU. There copies are cut for threads by the number of elements: with neighbours all threads have some.
_MOST_SAMPLES = 1 << 19
_NEIGHBOURS = 4
_cat = original_or_itself(torch.cat)
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

IN_PLACE = "it was changed in place"
BEHIND = "it was changed behind autograd's back"


class Seal:
    """Of a tensor as it is now: its version, and where it lies."""

    def __init__(self, tensor: Tensor) -> None:
        self.version = compat.version(tensor)
        self.place = _place(tensor)
        self.is_open = False  # a step was about to change it; not every optimizer's shows in the version
        self.was_gone = False  # at a step: whatever lies there since may be other values

    def is_of(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` lies where and as it did: its ``.data`` may have been replaced."""
        return _place(tensor) == self.place

    def is_written_to(self, tensor: Tensor) -> bool:
        """Whether autograd knows of a write to ``tensor``."""
        return self.version is not None and tensor._version != self.version

    def broken(self, tensor: Tensor, copy: Tensor | None = None) -> str:
        """How ``tensor`` was changed, as far as that shows without its values; empty if nothing shows.

        A ``copy`` of it was made when a step was about to change it.
        """
        if self.was_gone or is_gone(tensor):
            return "its memory was freed (FSDP frees what it gathered after the backward, or after the forward already)"
        if not self.is_of(tensor):
            return "its .data was replaced"
        if self.is_written_to(tensor):
            return IN_PLACE
        if self.is_open and copy is None:
            return "an optimizer's step has changed it"
        return ""

    def is_broken(self, tensor: Tensor, copy: Tensor) -> bool:
        """Whether ``tensor`` is no longer what its ``copy`` is."""
        if self.broken(tensor, copy):
            return True
        if _is_captured(tensor.device):
            return False
        with compat.modes_set_aside():
            return Difference((tensor.detach().resolve_neg(), copy)).is_there()


class Samples:
    """Of tensors as they are now, some elements of each.

    Writes through ``.data`` or by another library leave versions as they are. A sample has elements of every row and
    every column of a matrix (of up to 2^19, else from so many places): it shows what changes rows or columns as a
    whole.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        together: dict[Any, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            part = _sampled(tensor)
            kind = (part.dtype, part.shape[1]) if _are_taken_together(part) else name
            together.setdefault(kind, {})[name] = part
        self._taken = [
            ({name: part.shape[0] for name, part in parts.items()}, _copied([*parts.values()]))
            for parts in together.values()
        ]

    def difference(self, tensors: Mapping[str, Tensor]) -> Difference:
        """Whether samples of ``tensors`` are others now; by name, those of some tensors, whose seals are not broken."""
        if any(_is_captured(tensor.device) for tensor in tensors.values()):
            return Difference()
        with compat.modes_set_aside():
            pairs = []
            for rows, sample in self._taken:
                asked = [name for name in rows if name in tensors]
                if not asked:
                    continue
                if len(asked) < len(rows):
                    # By its operator, as below.
                    parts = torch.ops.aten.split_with_sizes.default(sample, [*rows.values()])
                    sample = _copied([part for name, part in zip(rows, parts, strict=True) if name in tensors])
                pairs.append((_copied([_sampled(tensors[name]) for name in asked]), sample))
            return Difference(*pairs)


class Difference:
    """Whether tensors differ. On a GPU it is computed in its turn there, and only who asks waits for it.

    So kernels can be launched that take their time while the host waits: the device does not wait for the host.
    """

    def __init__(self, *pairs: tuple[Tensor, Tensor]) -> None:
        """
        Args:
            pairs: whether the two of any differ, of one shape and dtype and all on one device; none if it is known that
                they do not.
        """
        self._computed: torch.cuda.Event | None = None
        self._is_there = False
        if not pairs:
            return
        bits = [(_bits(one), _bits(other)) for one, other in pairs]
        if not bits[0][0].is_cuda:
            self._is_there = not all(torch.equal(*pair) for pair in bits)
            return
        found = functools.reduce(torch.logical_or, (torch.ne(*pair).any() for pair in bits))
        self._found = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=True)
        self._found.copy_(found, non_blocking=True)
        self._computed = torch.cuda.Event()
        self._computed.record(torch.cuda.current_stream(bits[0][0].device))

    def is_known(self) -> bool:
        """Whether nobody has to wait."""
        return self._computed is None or self._computed.query()

    def is_there(self) -> bool:
        """Whether they differ; waits until that is known."""
        if self._computed is not None:
            self._computed.synchronize()
            with compat.modes_set_aside():
                return bool(self._found)
        return self._is_there


def is_gone(tensor: Tensor) -> bool:
    """Whether the memory of a tensor was freed, as FSDP frees what it gathered."""
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _sampled(tensor: Tensor) -> Tensor:
    """A view of the elements in the sample."""
    size, stride = _where_sampled(tensor.shape, tensor.stride())
    return torch.as_strided(tensor.detach() if tensor.requires_grad else tensor, size, stride)


def _copied(parts: list[Tensor]) -> Tensor:
    """A copy of each, one below the other."""
    return parts[0].clone() if len(parts) == 1 else _cat(parts)


def _is_captured(device: torch.device) -> bool:
    """Whether what is computed there is captured in a CUDA graph, so that nothing may wait for it."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _are_taken_together(part: Tensor) -> bool:
    """Whether one kernel copies parts of several tensors: on a GPU it is launches that they cost."""
    return part.is_cuda


@functools.lru_cache(maxsize=256)
def _where_sampled(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Size and stride of the sample: some neighbours every so many elements of the memory from the first to the last,
    counted in the largest steps that lead to all of its elements.

    A step that is prime to what lies between the beginnings of two rows comes upon every column in as many steps, and
    upon every row if it is no longer than the row.
    """
    if 0 in shape:
        return (0, 1), (1, 1)
    steps = [(size - 1, stride) for size, stride in zip(shape, strides, strict=True) if size > 1 and stride]
    # What lies between is of no interest: a weight may be one of several that take turns.
    unit = math.gcd(*(stride for _, stride in steps)) or 1
    axes = [(last, stride // unit) for last, stride in steps]
    extent = 1 + sum(last * stride for last, stride in axes)
    closest, *wider = sorted({stride for _, stride in axes}) or [1]
    row = wider[0] if wider else extent
    filled = 1 + sum(last * stride for last, stride in axes if stride < row)  # there may be a gap before the next
    step = max(min(filled, extent // row), 1)
    while math.gcd(step, row) > 1:
        step -= 1
    if step * _MOST_SAMPLES < extent:
        step = -(-extent // _MOST_SAMPLES)
        while math.gcd(step, row) > 1:
            step += 1
    # As many as have an element among them, or all.
    neighbours = min(max(_NEIGHBOURS, closest), step)
    # The last must not lie past the end; between the one before and that is no whole row.
    return (1 + (extent - neighbours) // step, neighbours), (step * unit, unit)


def _bits(tensor: Tensor) -> Tensor:
    # By its operator: programs put functions of theirs in the place of methods, ``reshape`` in that of this one, which
    # takes no dtype.
    return torch.ops.aten.view.dtype(tensor, _BITS[tensor.dtype.itemsize])
