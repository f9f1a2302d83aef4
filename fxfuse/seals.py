"""What shows that a tensor was written to, behind autograd's back too."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from . import compat

# One for each class of a vocabulary, and neighbours. Reading far apart is what they cost: microseconds on a GPU, a few
# ns each on a CPU. There copies are cut for threads by the number of elements: with neighbours all threads have some.
_MOST_SAMPLES = 1 << 19
_NEIGHBOURS = 4
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

IN_PLACE = "it was changed in place"
BEHIND = "it was changed behind autograd's back"


class Seal:
    """Of a tensor as it is now: its version, its address and a sample of its bits.

    Writes through ``.data`` or by another library leave the version as it is. The sample has elements of every row and
    every column of a matrix whose rows have no gaps inside (of up to 2^19, else from so many places): it shows what
    changes rows or columns as a whole. What is copied as a whole needs none.
    """

    def __init__(self, tensor: Tensor, copied: bool) -> None:
        self.version = compat.version(tensor)
        self.address = tensor.data_ptr()
        self.is_open = False  # a step was about to change it; not every optimizer's shows in the version
        self.was_gone = False  # at a step: whatever lies there since may be other values
        self.sample = None if copied else _sample(tensor)

    def is_of(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` lies where it did: its ``.data`` may have been replaced."""
        return tensor.data_ptr() == self.address

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

    def difference(self, tensor: Tensor, copy: Tensor | None = None) -> Difference:
        """Whether the sample differs from that of ``tensor``, which is not ``broken``; all of it from a ``copy``."""
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            return Difference()  # nothing may wait for what is captured
        with compat.modes_set_aside():
            now, then = (_sample(tensor), self.sample) if copy is None else (tensor.detach(), copy)
            assert then is not None
            return Difference(_bits(now.resolve_neg()), _bits(then))

    def is_broken(self, tensor: Tensor, copy: Tensor) -> bool:
        """Whether ``tensor`` is no longer what its ``copy`` is."""
        return bool(self.broken(tensor, copy)) or self.difference(tensor, copy).is_there()


class Difference:
    """Whether two tensors differ. On a GPU it is computed in its turn there, and only who asks waits for it.

    So kernels can be launched that take their time while the host waits: the device does not wait for the host.
    """

    def __init__(self, *pair: Tensor) -> None:
        """
        Args:
            pair: the two, of one shape and dtype; none if it is known that they do not differ.
        """
        self._computed: torch.cuda.Event | None = None
        self._is_there: bool | Tensor = bool(pair) and not pair[0].is_cuda and not torch.equal(*pair)
        if pair and pair[0].is_cuda:
            self._is_there = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=True)
            self._is_there.copy_(torch.ne(*pair).any(), non_blocking=True)
            self._computed = torch.cuda.Event()
            self._computed.record(torch.cuda.current_stream(pair[0].device))

    def is_known(self) -> bool:
        """Whether nobody has to wait."""
        return self._computed is None or self._computed.query()

    def is_there(self) -> bool:
        """Whether they differ; waits until that is known."""
        if self._computed is None:
            return bool(self._is_there)
        self._computed.synchronize()
        with compat.modes_set_aside():
            return bool(self._is_there)


def is_gone(tensor: Tensor) -> bool:
    """Whether the memory of a tensor was freed, as FSDP frees what it gathered."""
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def _sample(tensor: Tensor) -> Tensor:
    """A copy of some of its elements."""
    without_gradient = tensor.detach() if tensor.requires_grad else tensor
    return torch.as_strided_copy(without_gradient, *_where_sampled(tensor.shape, tensor.stride()))


@functools.lru_cache(maxsize=256)
def _where_sampled(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Size and stride of the sample: some neighbours every so many elements of the memory from the first to the last.

    A step that is prime to what lies between the beginnings of two rows comes upon every column in as many steps, and
    upon every row if it is no longer than the row.
    """
    if 0 in shape:
        return (0, 1), (1, 1)
    axes = [(size - 1, stride) for size, stride in zip(shape, strides, strict=True) if size > 1 and stride]
    extent = 1 + sum(last * stride for last, stride in axes)
    _, *wider = sorted({stride for _, stride in axes}) or [1]
    row = wider[0] if wider else extent
    filled = 1 + sum(last * stride for last, stride in axes if stride < row)  # there may be a gap before the next
    step = max(min(filled, extent // row), 1)
    while math.gcd(step, row) > 1:
        step -= 1
    if step * _MOST_SAMPLES < extent:
        step = -(-extent // _MOST_SAMPLES)
        while math.gcd(step, row) > 1:
            step += 1
    neighbours = min(_NEIGHBOURS, step)
    # The last must not lie past the end; between the one before and that is no whole row.
    return (1 + (extent - neighbours) // step, neighbours), (step, 1)


def _bits(tensor: Tensor) -> Tensor:
    # By its operator: programs are known to put ``reshape`` in the place of the method, which takes no dtype.
    return torch.ops.aten.view.dtype(tensor, _BITS[tensor.dtype.itemsize])
