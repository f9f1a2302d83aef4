"""The options of the backend, ``torch.compile(model, backend="fxfuse", options={"fxfuse.…": …})``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from . import errors

PREFIX = "fxfuse."


@dataclass(frozen=True)
class Options:
    """fxfuse's own options, each given as ``"fxfuse.<name>"``.

    Attributes:
        enabled: False hands every graph to the inner backend as it is.
        min_logits_bytes: logits smaller than this many bytes are left alone; 0 fuses everything that is sound.
        inner: the registered backend that compiles the rewritten graph.
        memory: bytes that the buffers for gradients should take, beside the gradients: these are then made in the
            backward, in four products instead of three. 0 for what is fastest. See README.
        defer_logits: return logits that leave a graph as ``DeferredLogits``, which are computed when they are read.
        recompute: where a head is fused, let Inductor's backward compute again what it needs for a product and what
            takes a pass over memory (an activation function, a norm), where Inductor alone would keep it.
        causal_attention: call ``scaled_dot_product_attention`` with ``is_causal=True`` where a graph makes a causal
            mask itself, and without a mask that hides nothing.
        strict: raise ``FxfuseError`` where a head is kept dense for a reason that the user can mend.
    """

    enabled: bool = True
    min_logits_bytes: int = 16 << 20
    inner: str = "inductor"
    memory: int = 0
    defer_logits: bool = True
    recompute: bool = True
    causal_attention: bool = True
    strict: bool = False

    @classmethod
    def parse(cls, given: Mapping[str, Any] | None) -> tuple[Options, dict[str, Any]]:
        """Split ``given`` into fxfuse's options and those of the inner backend.

        Raises:
            ValueError: no dict with strings for keys; an unknown key that starts with ``fxfuse.``; a value of the wrong
                type or range.
        """
        given = given or {}
        if not (isinstance(given, Mapping) and all(isinstance(key, str) for key in given)):
            raise errors.bad_options(given)
        own: dict[str, Any] = {}
        inner: dict[str, Any] = {}
        types = {f.name: type(f.default) for f in fields(cls)}
        for key, value in given.items():
            if not key.startswith(PREFIX):
                inner[key] = value
                continue
            name = key.removeprefix(PREFIX)
            if name not in types:
                raise errors.unknown_option(key, (PREFIX + known for known in types))
            if type(value) is not types[name] or (isinstance(value, int) and not 0 <= value < 2**63):
                raise errors.bad_option(key, value, _EXPECTED[types[name]])
            own[name] = value
        return cls(**own), inner


_EXPECTED = {
    bool: "True or False",
    int: "a number of bytes, from 0 to 2**63 - 1",
    str: "the name of a registered backend",
}
