"""The arguments of calls as trees, like ``torch.utils._pytree``, which takes several times as long for most calls.

Each operator on deferred logits has its arguments walked over several times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._pytree import SUPPORTED_NODES, tree_leaves, tree_map


def leaves(tree: Any) -> list[Any]:
    """All that is in nested tuples, lists, dicts and whatever else PyTorch takes for such."""
    kind = type(tree)
    if kind is tuple or kind is list:
        return [leaf for branch in tree for leaf in ((branch,) if _is_leaf(type(branch)) else leaves(branch))]
    if kind is dict:
        return [leaf for branch in tree.values() for leaf in leaves(branch)]
    return [tree] if _is_leaf(kind) else tree_leaves(tree)


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same tree with what ``function`` returns of each leaf."""
    kind = type(tree)
    if kind is tuple or kind is list:
        return kind([function(branch) if _is_leaf(type(branch)) else mapped(function, branch) for branch in tree])
    if kind is dict:
        return {key: mapped(function, branch) for key, branch in tree.items()}
    return function(tree) if _is_leaf(kind) else tree_map(function, tree)


def map_only(kinds: type | tuple[type, ...], function: Callable[[Any], Any], tree: Any) -> Any:
    """The same tree with what ``function`` returns of each leaf of these ``kinds``, and the others as they are."""
    return mapped(lambda leaf: function(leaf) if isinstance(leaf, kinds) else leaf, tree)


def _is_leaf(kind: type) -> bool:
    return kind not in SUPPORTED_NODES and not issubclass(kind, tuple)  # which may have names
