"""Run a program with fake tensors: every shape is right, nothing large is allocated, and nothing is computed."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .. import compat

SMALL = 1 << 20  # bytes

# What these functions of torch.ops.aten return for a NaN, whatever it is compared with.
_OF_NAN = {"lt": False, "le": False, "gt": False, "ge": False, "eq": False, "ne": True, "isnan": True, "isinf": False}

_NOT_THEIRS = tuple(str(Path(file).parent) + os.sep for file in (torch.__file__, Path(__file__).parent))


class NoValue(RuntimeError):
    """The values of a fake tensor were asked for in a way that PyTorch would not refuse in time."""


NO_VALUE = (NoValue, *compat.NO_VALUE)


@contextlib.contextmanager
def fake() -> Iterator[None]:
    """Make every tensor that is created inside, in this thread, a fake one.

    Integers that are computed from no fake tensor stay real while they take no more than ``SMALL`` bytes: seeds,
    samplers and batches index with them. A float that is read from a fake tensor is NaN, and comparing two numbers
    gives what it gives for NaN. What is made on the meta device is made on the CPU.

    Raises (inside):
        NO_VALUE: where the program needs another value, or writes a checkpoint.
    """
    loader = torch.utils.data.DataLoader
    of_workers = loader._get_iterator

    def in_this_process(self: Any) -> Any:
        self.num_workers = 0  # a fake tensor cannot be sent to another process
        return of_workers(self)

    with (
        mock.patch.object(loader, "_get_iterator", in_this_process),
        mock.patch.object(torch, "save", _refuse),  # it would truncate the file first
        mock.patch.object(compat.FakeTensor, "__format__", _formatted),
        mock.patch.object(compat.FakeTensor, "__int__", _whole),
        mock.patch.object(compat.FakeTensor, "numpy", _no_array),
        mock.patch.object(compat.FakeTensor, "__array__", _no_array),
        compat.fake_parameters_convert(),
        _Mode(),
    ):
        yield


def asked_by(error: BaseException) -> str:
    """``file.py:line`` of the statement of the program that needed a value."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(_NOT_THEIRS)]
    return f"{theirs[-1].filename}:{theirs[-1].lineno}" if theirs else "an unknown place"


class _Mode(compat.FakeTensorMode):
    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._decomposing = False

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._decomposing:  # what an operation on fake tensors is made of: its results are no one's real numbers
            return super().dispatch(func, types, args, kwargs)
        kwargs = dict(kwargs or {})
        if getattr(kwargs.get("device"), "type", "") == "meta":
            kwargs["device"] = torch.device("cpu")
        has_fakes = any(compat.is_fake(leaf) for leaf in tree_leaves((args, kwargs)))
        self._decomposing = True
        try:
            made: Any = super().dispatch(func, types, args, kwargs)
        except compat.NO_VALUE:
            if not has_fakes:
                return _for_real(func, args, kwargs)
            if func is torch.ops.aten._local_scalar_dense.default and _is_inexact(args[0]):
                return float("nan")
            raise
        finally:
            self._decomposing = False
        answer = _OF_NAN.get(func.overloadpacket.__name__)
        if answer is not None and _is_inexact(args[0]) and made.dim() == 0 and made.constant is None:
            made.constant = _for_real(torch.tensor, (answer,), {})
            self.fake_tensor_converter.add_constant_storage_mapping(made)  # until something writes to it
        if has_fakes or not all(map(_is_small, tree_leaves(made))):
            return made
        return _for_real(func, args, kwargs)


def _is_inexact(value: object) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _is_small(made: object) -> bool:
    if not isinstance(made, Tensor) or _is_inexact(made):
        return False
    return made.device.type == "cpu" and made.numel() * made.itemsize <= SMALL


def _for_real(func: Any, args: Any, kwargs: Any) -> Any:
    with compat.unset_fake_temporarily():
        return func(*args, **kwargs)


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise NoValue("fake tensors cannot be saved")


def _no_array(*args: Any, **kwargs: Any) -> NoReturn:
    raise NoValue("fake tensors are no arrays")


def _whole(tensor: Tensor) -> int:
    if _is_inexact(tensor):
        raise NoValue("NaN is no whole number")
    return int(tensor.item())


def _formatted(tensor: Tensor, spec: str) -> str:
    return format(tensor.item() if tensor.dim() == 0 else repr(tensor), spec)
