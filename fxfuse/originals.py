"""PyTorch's own functions, in whose place a program has put functions of its own.

``F.cross_entropy = with_z_loss`` is one: PyTorch's function, which that calls, then tells a tensor's
``__torch_function__`` that it is whatever goes by its name, the program's function, which would so run once more. And a
graph may call the program's function by PyTorch's name.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch

from . import compat, errors
from .report.source import OWN, TORCH

_OWN_MODULES = ("torch", "builtins", "operator", "_operator", "math")
_OWN_OPERATORS = ("aten.", "prims.", "prim.", "fxfuse.")


def is_own(function: Any) -> bool:
    """Whether it is PyTorch's, Python's or ours.

    ``functools.wraps`` copies names, so that these do not tell, and a proxy has the attributes of what it stands for.
    """
    for _ in range(20):  # as many as nobody wraps around each other
        if type(function) is not FunctionType:
            return _is_made_in_c(function)
        if not function.__code__.co_filename.startswith((OWN, TORCH)):
            return False
        if "__wrapped__" not in vars(function):
            return True
        function = vars(function)["__wrapped__"]
    return False


def _is_made_in_c(function: Any) -> bool:
    if isinstance(function, (compat.OpOverload, compat.OpOverloadPacket)):
        return str(function).startswith(_OWN_OPERATORS)
    if type(function) is BuiltinFunctionType or isinstance(function, type):  # extensions' are such, too
        return (function.__module__ or "torch").split(".")[0] in _OWN_MODULES
    return type(function).__module__ == "builtins" and type(function) is not MethodType


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


def original_or_itself(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same, but ``function`` where it cannot be told."""
    try:
        return original(function)
    except errors.FxfuseError:
        return function


def _behind(function: Any, homes: list[Any]) -> dict[Callable[..., Any], str]:
    """PyTorch's functions that go by a name that is now ``function``'s, with these names."""
    return {
        own: name
        for home in homes
        for name, value in tuple(vars(home).items())  # to which another thread may add
        if value is function and (own := _own(home, name)) is not None
    }


@functools.cache
def _own(home: Any, name: str) -> Callable[..., Any] | None:
    """PyTorch's function of that name."""
    known = _AT_FIRST[home].get(name)
    if known is not None and is_own(known):
        return known
    # There was another when fxfuse was imported, which has PyTorch's somewhere, or nothing would ask for it.
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
    wrapped = [vars(each).get("__wrapped__") for each in found]
    found = [each for each in found if not any(each is other for other in wrapped)]
    return found[0] if len(found) == 1 else getattr(beneath, name, None)


_AT_FIRST: dict[Any, dict[str, Any]] = {home: dict(vars(home)) for home in compat.HOMES}
