"""``torch._foreach_…_``, which write to lists of tensors, where deferred logits are among these.

PyTorch's own writes there lose what autograd keeps of a tensor, so such a list is written to tensor by tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import trees
from .lazy_tensor import is_leaf


def writes_to_list(func: Any) -> bool:
    """Whether ``func`` is one of ``torch._foreach_…_``."""
    name = getattr(func, "__name__", "")
    return name.startswith("_foreach_") and name.endswith("_")


def list_of(self: Any = (), *_: Any, **__: Any) -> Any:
    """The list that such a function writes to."""
    return self


def write_one_by_one(func: Any, /, self: Any, *args: Any, **kwargs: Any) -> Any:
    """What ``func`` does to a list, in its order, as a tensor may be in it twice, or be read after it was written to.

    Of views of a subclass PyTorch loses the gradient, of other tensors the version.
    """
    for tensor in self:
        if torch.is_grad_enabled() and tensor.requires_grad and is_leaf(tensor):
            tensor.zero_()  # which raises, before anything is written
    if func is torch._foreach_zero_:
        for tensor in self:
            tensor.zero_()
        return self
    out_of_place = _copied if func is torch._foreach_copy_ else getattr(torch, func.__name__[:-1])

    def is_several(given: Any) -> bool:
        """Whether it has something for each: other tensors, numbers, or a vector of these."""
        return isinstance(given, (tuple, list)) or (isinstance(given, Tensor) and given.dim() == 1)

    if any(is_several(given) and len(given) != len(self) for given in (*args, *kwargs.values())):
        out_of_place(self, *args, **kwargs)  # which raises
    for i, tensor in enumerate(self):
        mine = [given[i : i + 1] if is_several(given) else given for given in args]
        named = {name: given[i : i + 1] if is_several(given) else given for name, given in kwargs.items()}
        # Of copies, which gradients may need: what is written to may be among the others too.
        mine, named = trees.map_only(Tensor, torch.clone, (mine, named))
        (result,) = out_of_place([tensor.clone()], *mine, **named)
        tensor.copy_(result)
    return self


def _copied(self: Any, src: Any, non_blocking: bool = False) -> Any:
    """What ``torch._foreach_copy_`` writes."""
    if len(self) != len(src):
        torch._foreach_add(self, src)  # which raises
    return src
