"""The rule table: what each torch function does to a value derived from a head.

A rule is one function and the list of callables (and method names) that it is the rule of. It takes the call and
the described arguments, and returns what the result is: another ``ClassTensor``, a ``Reader``, or a tuple of these for
a function that returns several. It refuses with
``call.keep(code, detail)``. A function without a rule makes the head dense, and so does an argument that the rule
does not name and that has not its default value: an unknown spelling can cost speed, never correctness.

All drivers look functions up here, and nowhere else.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, overload

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..algebra import ClassTensor, Entries, Head, Logits, quickly_replace
from ..compat import has_node
from ..originals import original_or_itself
from ..readers import Reader
from ..reasons import Reason, because
from ..replay import ClassOp, RowOp


class Keep(Exception):
    """Raised by a rule: the logits are really needed here."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.sentence)
        self.reason = reason


def _unknown(*_: Any) -> None:
    return None


@dataclass(frozen=True)
class Call:
    """One application of a torch function.

    Attributes:
        name: of the function, as people write it.
        out: an example of what eager returns (shape, dtype, device); a tuple where it returns several.
        example: from a handle to an example tensor.
        where: ``file.py:line`` in the user's source, if known.
        reader_of: from a handle to the reader that returned it, perhaps with axes of size one added since; None where
            that is not known or something may have written to it.
        entries_of: from a handle to what the tensor certainly holds, or None.
        unexpanded: from a handle to what it was expanded from, where nothing else can see its gradient; else None.
        grad: False where no gradient comes back: it is called under no_grad, or what it returns is detached.
        autocast: whether it is called under autocast for the device of the logits.
    """

    name: str
    out: Any
    example: Callable[[Any], Tensor]
    where: str | None = None
    reader_of: Callable[[Any], Reader | None] = _unknown
    entries_of: Callable[[Any], Entries | None] = _unknown
    unexpanded: Callable[[Any], Any] = _unknown
    grad: bool = True
    autocast: bool = False

    def constant(self, handle: Any) -> float | None:
        """The number that a 0-d tensor certainly holds, or None."""
        example = self.example(handle)
        return self.constant_everywhere(handle) if isinstance(example, Tensor) and example.dim() == 0 else None

    def constant_everywhere(self, handle: Any) -> float | None:
        """The number that a tensor certainly holds in every entry, or None."""
        entries = self.entries_of(handle)
        return entries.off if entries is not None and entries.classes is None else None

    def targets_in(self, handle: Any) -> Entries | None:
        """What a tensor certainly holds that has something else for one class of each row, or None."""
        example = self.example(handle)
        if not isinstance(example, Tensor) or example.dim() == 0:  # which is not asked for its number in vain
            return None
        entries = self.entries_of(handle)
        return entries if entries is not None and entries.classes is not None else None

    def number_in(self, value: Any) -> float | None:
        """A number, or that which a tensor certainly holds in every entry; None if it is not known."""
        return value if isinstance(value, (int, float)) else self.constant_everywhere(value)

    def keep(self, code: str, detail: str = "") -> NoReturn:
        """Refuse: leave the head dense, for the reason ``code``."""
        raise Keep(because(code, detail or self.name, self.where))


Function = Callable[..., Any] | str


@dataclass(frozen=True)
class Rule:
    """A row of the table: how to call ``apply``, and what the function tells of the tensor that it reads.

    ``reads`` is ``"loss"`` where only logits are read so, ``"scores"`` where attention or a router may be, else empty.
    ``derives`` says that what it returns still has an entry a class, ``takes_parts`` that it knows several values in
    the place of one.
    """

    apply: Callable[..., Any]
    signature: inspect.Signature
    tracked: tuple[str, ...]
    wanted: frozenset[str]  # the arguments that ``apply`` takes
    reads: str = ""
    derives: bool = True
    takes_parts: bool = False

    def __call__(self, call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        try:
            given = self._by_name(args, kwargs)
        except TypeError:
            call.keep("unsupported_argument", f"{call.name} is called in a form that fxfuse does not know")
        if self.tracked and not any(_holds_class_tensor(given.get(name)) for name in self.tracked):
            call.keep("unknown_reader")
        for name, value in given.items():
            if name not in self.tracked and _holds_class_tensor(value):
                call.keep("unknown_reader", f"{call.name} (as its argument {name})")
            if name in self.wanted or name.startswith("_"):
                continue
            if not _is(value, self.signature.parameters[name].default):
                call.keep("unsupported_argument", f"{call.name} has {name}={value!r}, which fxfuse does not support")
        return self.apply(call, **{name: value for name, value in given.items() if name in self.wanted})

    def _by_name(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The arguments that are given.

        Raises:
            TypeError: they do not fit.
        """
        known = not torch.compiler.is_dynamo_compiling()  # which cannot trace what remembers
        names = self._names(len(args), tuple(kwargs)) if known else None
        if names is None:
            return self.signature.bind(*args, **kwargs).arguments
        return dict(zip(names, (*args, *kwargs.values()), strict=True))

    @functools.cached_property
    def _names(self) -> Callable[[int, tuple[str, ...]], tuple[str, ...] | None]:
        """Of which parameters so many arguments are, and those with keywords; None where one of them takes several.

        To find that out takes longer than many a rule, and programs call the same ways again.
        """
        several = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD

        @functools.lru_cache(maxsize=64)
        def names(positional: int, keywords: tuple[str, ...]) -> tuple[str, ...] | None:
            if any(parameter.kind in several for parameter in self.signature.parameters.values()):
                return None
            bound = self.signature.bind(*range(positional), **dict.fromkeys(keywords)).arguments
            return (*(name for name in bound if name not in keywords), *keywords)

        return names


def _is(value: Any, default: Any) -> bool:
    return value is default or (not isinstance(value, Tensor) and value == default)


def _holds_class_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        return any(_holds_class_tensor(v) for v in value)
    return isinstance(value, ClassTensor)


TABLE: dict[Function, Rule] = {}
# Functions that write what a rule says of them into their first argument.
IN_PLACE: dict[Function, Rule] = {}
HEADS: dict[Function, Rule] = {}


def _register(table: dict[Function, Rule], functions: tuple[Function, ...], make: Callable[..., Rule]) -> Any:
    def decorate(apply: Callable[..., Any]) -> Callable[..., Any]:
        row = make(apply)
        for function in functions:
            if not isinstance(function, str):
                table[original_or_itself(function)] = row
                continue
            table[function] = row
            if hasattr(torch.Tensor, function):
                table[original_or_itself(getattr(torch.Tensor, function))] = row
        return apply

    return decorate


def _after_call(apply: Callable[..., Any]) -> inspect.Signature:
    """The signature of a rule without its first parameter, the call."""
    signature = inspect.signature(apply)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def rule(
    *functions: Function,
    like: Callable[..., Any] | None = None,
    tracked: tuple[str, ...] = ("input",),
    reads: str = "",
    derives: bool | None = None,
    takes_parts: bool = False,
    in_place: tuple[Function, ...] = (),
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make the decorated function the rule of ``functions`` (callables, or names of tensor methods).

    Arguments are bound by the signature of ``like``, of the rule itself if not given; the rule receives those
    that it names. ``tracked`` are the arguments that may be described values. A rule that ``reads`` derives nothing,
    unless it says so; one that ``takes_parts`` is also called where several values are in the place of one.
    ``in_place`` are the functions that do the same to their first argument.
    """
    keeps_classes = not reads if derives is None else derives

    def make(apply: Callable[..., Any]) -> Rule:
        own = _after_call(apply)
        signature = inspect.signature(original_or_itself(like)) if like else own
        return Rule(apply, signature, tracked, frozenset(own.parameters), reads, keeps_classes, takes_parts)

    def decorate(apply: Callable[..., Any]) -> Callable[..., Any]:
        _register(IN_PLACE, in_place, make)(apply)
        return _register(TABLE, functions, make)(apply)

    return decorate


def head(
    *functions: Function, like: Callable[..., Any] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make the decorated function say which ``Head``, if any, a call of ``functions`` is; ``like`` as for a rule."""

    def make(apply: Callable[..., Any]) -> Rule:
        own = _after_call(apply)
        signature = inspect.signature(original_or_itself(like)) if like else own
        return Rule(apply, signature, (), frozenset(own.parameters))

    return _register(HEADS, functions, make)


def heads_of(function: Function, call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Head, ...]:
    """The heads that this call may be, the likeliest first; usually one or none."""
    row = HEADS.get(function)
    if row is None:
        return ()
    try:
        found = row(call, args, kwargs)
    except Keep:
        return ()
    return found if isinstance(found, tuple) else () if found is None else (found,)


Outcome = ClassTensor | Reader


def outcomes_of(call: Call, result: Any, given: Sequence[ClassTensor] = ()) -> list[tuple[Outcome, Any]]:
    """What a rule returned, taken apart, each with what eager returns there, and cut off where that is.

    ``given``: what it was made of, if nothing else shows the gradients that it begins to have.
    """
    many = isinstance(result, tuple)
    if many and isinstance(call.out, Tensor):  # stacked, with the gradients that they had
        return [(one if call.out.requires_grad else replace(one, requires_grad=False), call.out) for one in result]
    pairs = list(zip(result, call.out, strict=True)) if many else [(result, call.out)]
    return [(cut_off(quickly_replace(call, out=out), one, given), out) for one, out in pairs]


@overload
def cut_off(call: Call, outcome: ClassTensor, given: Sequence[ClassTensor] = ()) -> ClassTensor: ...
@overload
def cut_off(call: Call, outcome: Reader, given: Sequence[ClassTensor] = ()) -> Reader: ...
def cut_off(call: Call, outcome: Outcome, given: Sequence[ClassTensor] = ()) -> Outcome:
    """``outcome``, marked where no_grad keeps gradients from flowing through it.

    A view that is made under no_grad of a tensor that requires grad claims to require it too, but has no grad_fn.
    What is read of it later with gradients on then requires grad to no effect, which the fused ops do not imitate.
    """
    source: ClassTensor = outcome.source if isinstance(outcome, Reader) else outcome
    has_gradient = call.out.requires_grad and has_node(call.out)
    if has_gradient is None:
        call.keep("mutated", "something, while a view of them that was made under no_grad is used,")
    if has_gradient:
        if source.requires_grad:
            return outcome
        begun = _begun(call, given[0], outcome) if len(given) == 1 and type(outcome) is Logits else None
        return begun or call.keep("unknown_reader", f"{call.name}, with a gradient, of logits without one,")
    source = replace(source, requires_grad=False)
    return replace(outcome, source=source) if isinstance(outcome, Reader) else source


def _begun(call: Call, given: ClassTensor, outcome: Logits) -> Logits | None:
    """``outcome`` with the gradient of an operand of this call, before which there is none; None if it has no such."""
    rows, classes, shifts = len(given.row_ops), len(given.class_ops), len(given.row_shifts)
    row_ops, class_ops, row_shifts = outcome.row_ops, outcome.class_ops, outcome.row_shifts
    of_rows, of_classes = [op.args for op in row_ops[rows:]], [op.args for op in class_ops[classes:]]
    new = of_rows, of_classes, [one.handle for one in row_shifts[shifts:]]
    if not any(getattr(call.example(leaf), "requires_grad", False) for leaf in tree_leaves(new)):
        return None
    return replace(
        outcome,
        requires_grad=True,
        row_ops=(*row_ops[:rows], RowOp(torch.detach, (), keeps_order=True), *row_ops[rows:]),
        class_ops=(*class_ops[:classes], ClassOp("detach", ()), *class_ops[classes:]),
        row_shifts=(*row_shifts[:shifts], *(replace(one, since=one.since + 1) for one in row_shifts[shifts:])),
    )


# Importing a family fills the table.
from . import casts, heads, infinite, log_probs, losses, shapes, statistics, transforms, two_heads, views  # noqa: E402, F401
