"""PyTorch's own functions, in whose place a program has put functions of its own.

``F.cross_entropy = with_z_loss`` is one: PyTorch's function, which that calls, then tells a tensor's
``__torch_function__`` that it is whatever goes by its name, the program's function, which would so run once more. And a
graph may call the program's function by PyTorch's name.
"""

from __future__ import annotations

import functools
import gc
import inspect
import os
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from . import compat, errors

_FOLDERS = tuple(os.path.join(os.path.dirname(file), "") for file in (torch.__file__, __file__))


def is_own(function: Any) -> bool:
    """Whether it is PyTorch's, Python's or ours. ``functools.wraps`` copies names, so that these do not tell."""
    made = [function]
    while hasattr(made[-1], "__wrapped__"):
        made.append(made[-1].__wrapped__)
    return all(map(_is_own, made))


def _is_own(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    if code is not None:
        return str(code.co_filename).startswith(_FOLDERS)
    return type(function).__module__.split(".")[0] in ("builtins", "torch")


def original(function: Callable[..., Any]) -> Callable[..., Any]:
    """What ``function`` was put in the place of, or itself.

    Raises:
        FxfuseError: if it was put in the place of several.
    """
    if is_own(function):
        return function
    # Those in ``torch`` itself ask for themselves in another place, which nobody knows.
    found = _behind(function, [home for home in compat.HOMES if home is not torch]) or _behind(function, [torch])
    if len(found) > 1:
        raise errors.put_in_place_of(function, list(found.values()))
    return next(iter(found), function)


def _behind(function: Any, homes: list[Any]) -> dict[Callable[..., Any], str]:
    """PyTorch's functions that go by a name that is now ``function``'s, with these names."""
    return {
        own: name
        for home in homes
        for name, value in vars(home).items()
        if value is function and (own := _own(home, name)) is not None
    }


@functools.cache
def _own(home: Any, name: str) -> Callable[..., Any] | None:
    """PyTorch's function of that name: the program's function has it somewhere, or nothing would ask for it."""
    module, beneath = compat.HOMES[home]
    qualified = f"Tensor.{name}" if home is torch.Tensor else name
    found = [
        each
        for each in gc.get_objects()
        if type(each) is FunctionType
        and each.__globals__ is vars(module)
        and each.__qualname__ == qualified
        and is_own(each)
    ]
    wrapped = [inspect.unwrap(each) for each in found if hasattr(each, "__wrapped__")]
    found = [each for each in found if each not in wrapped]
    return found[0] if len(found) == 1 else getattr(beneath, name, None)
