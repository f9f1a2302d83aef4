"""``fxfuse.ops.cuda`` against the float64 reference: on a GPU, or on a CPU under Triton's interpreter.

Every case runs twice, with hidden sizes that tensor descriptors can describe and with ones that they cannot: the two
ways through the ops. Descriptors are used where there is a GPU that has them, for operands in 16 bits.

Triton decides when it is imported whether its kernels are interpreted, and importing torch may import it. So where
there is no GPU, this file runs itself once as a script in a process with TRITON_INTERPRET=1, which runs every case
and writes one result per case; the tests report those.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import math
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from interpreted import DTYPES, HAS_GPU, Cases, made_of
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from fxfuse import compat
from fxfuse.kernels import tiles
from fxfuse.ops import cuda, general, gpu, reference, windows
from fxfuse.ops.contract import Coefficients
from fxfuse.transform import apply, decode

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")

# Errors are the largest absolute error over the largest absolute value of the float64 result. Statistics never see a
# 16-bit rounding, so their bound does not depend on the dtype. A gradient may err by 1.5 times what eager PyTorch errs
# in the same dtype, plus a floor of about a quarter of the dtype's unit roundoff (fp32: for the order of summation).
STATS_BOUND = 5e-6
GRADIENT_FLOOR = {torch.float32: 2e-6, torch.float16: 1e-4, torch.bfloat16: 1e-3}

CASES = Cases()
# "played" is "described" with each call made three times, with other tensors: see ``kernels.recorder``. The interpreter
# takes too long for all of that.
ROUTES = ("described", "general", "played") if HAS_GPU else ("described", "general")
ALL_ROUTES = ("described", "general", "played")
route = "described"


def case(
    *, gpu_only: bool = False, each_dtype: bool = False, routes: tuple[str, ...] = ROUTES
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function as one case for each route, and each dtype."""

    def register(check: Callable[..., None]) -> Callable[..., None]:
        if gpu_only and not HAS_GPU:
            return check
        for way in routes:
            for dtype in DTYPES if each_dtype else (None,):
                name = "-".join(filter(None, (check.__name__, way, dtype and str(dtype).removeprefix("torch."))))
                CASES[name] = lambda way=way, dtype=dtype: run_case(check, way, dtype)
        return check

    return register


def run_case(check: Callable[..., None], way: str, dtype: torch.dtype | None) -> None:
    global route
    route = "described" if way == "played" else way
    with three_times() if way == "played" else never_played():
        check(*(() if dtype is None else (dtype,)))


@contextlib.contextmanager
def never_played() -> Iterator[None]:
    """Let each op launch its kernels itself, also if calls that look alike came before, in another case perhaps."""
    from fxfuse.kernels import recorder

    with mock.patch.object(recorder, "_tapes", {}), mock.patch.object(recorder, "ATTEMPTS", 0):
        yield


@contextlib.contextmanager
def three_times() -> Iterator[None]:
    """Let each op be called three times: in steps, on a tape, from the tape. The bits are the same."""
    from fxfuse.kernels import launcher, recorder, tape

    def thrice(name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            recorder._tapes.clear()
            again = [copied((args, (*options.values(),))) for _ in range(2)]
            others = (op(*args, **dict(zip(options, values, strict=True))) for args, values in again)
            results = op(*args, **options), *others
            if name in exponentials or cuda._is_described(*args, **options):
                made = [*recorder._tapes.values()]
                assert made and all(isinstance(one, tape.Tape) for one in made), f"{name} is on no tape"
            # Of exponentials, rows without work hold anything; the gradients that they give are compared.
            first, *others = results if name != "linear_loss_exponentials" else [loss for loss, *_ in results]
            for other in others:
                for a, b in zip(tensors(first), tensors(other), strict=True):
                    assert torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan()), name
            return results[-1]

        return run

    exponentials = "linear_loss_exponentials", "linear_loss_exponentials_backward"
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(recorder, "MOST_STEPS", 1 << 20))
        if not HAS_GPU:
            stack.enter_context(mock.patch.object(launcher, "_Interpreted", AtAddresses))
        for name in ("linear_stats", "linear_stats_backward", "linear_loss", *exponentials):
            stack.enter_context(mock.patch.object(cuda, name, thrice(name, getattr(cuda, name))))
        yield


class AtAddresses:
    """A kernel under the interpreter that is given no more of its tensors than a compiled one: where they begin."""

    by_address = True

    class Address(int):
        tensor: Tensor

    def __init__(self, kernel: Any, constants: dict[str, Any]) -> None:
        self.kernel, self.constants = kernel, constants
        self.looks: list[Any] = []  # of each tensor or descriptor that is given: dtype, shape, strides

    def place(self, tensor: Tensor) -> int:
        address = self.Address(tensor.data_ptr())
        address.tensor = tensor
        return address

    def prepare(self, grid: tuple[int, ...], args: Any) -> None:
        return None

    def launch(self, grid: tuple[int, ...], args: Any, on: int | None = None) -> None:
        bases = [getattr(arg, "base", arg) for arg in args]
        if not self.looks:  # by the op itself
            given = [base.tensor if isinstance(base, self.Address) else base for base in bases]
            self.looks = [(t.dtype, t.shape, t.stride()) if isinstance(t, Tensor) else None for t in given]
        else:
            assert not any(isinstance(base, (Tensor, self.Address)) for base in bases)
        with compat.disable_dispatch_modes():
            given = [
                arg if look is None else self.there(arg, *look) for arg, look in zip(args, self.looks, strict=True)
            ]
            self.kernel[grid](*given, **self.constants)

    def there(self, arg: Any, dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...]) -> Any:
        if hasattr(arg, "base"):
            rest = {name: value for name, value in vars(arg).items() if name != "base"}
            return type(arg)(self.there(arg.base.data_ptr(), dtype, shape, strides), **rest)
        if 0 in shape:
            return torch.empty_strided(shape, strides, dtype=dtype)
        last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        memory = (ctypes.c_byte * ((last + 1) * dtype.itemsize)).from_address(arg)
        return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)


def copied(values: tuple[Any, ...]) -> Any:
    """The same at other addresses, laid out alike, and the same tensors the same."""
    copies: dict[int, Tensor] = {}

    def copy(value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in copies:
                memory = value.untyped_storage().clone()
                laid_out = value.storage_offset(), value.shape, value.stride()
                copies[id(value)] = value.new_empty(0).set_(memory, *laid_out)
            return copies[id(value)]
        return tuple(map(copy, value)) if isinstance(value, tuple) else value

    return copy(values)


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, tuple):
        return [tensor for item in value for tensor in tensors(item)]
    return [value]


def fit(hidden: int) -> int:
    """The nearest hidden size that takes the route: descriptors want multiples of 16."""
    return -(-hidden // 16) * 16 if route == "described" else hidden | 1


# --- problems -------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Problem:
    """One call's operands, and upstream gradients for it."""

    x: Tensor
    w: Tensor
    bias: Tensor | None
    index: Tensor
    class_weight: Tensor | None
    scale: float
    want_class_sum: bool
    g_lse: Tensor
    g_picked: Tensor
    g_class_sum: Tensor | None
    transform: str = ""
    g_entropy: Tensor | None = None

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None, float]:
        return self.x, self.w, self.bias, self.index, self.class_weight, self.scale

    @property
    def upstream(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.g_lse, self.g_picked, self.g_class_sum

    @property
    def coefficients(self) -> tuple[Tensor, Tensor | None]:
        """The same of log-probabilities, and of their sums, for a loss.

        Not of a single class, where the gradient of that sum is 0: eager's is exact, here parts cancel to rounding.
        """
        return self.g_picked, self.g_class_sum if len(self.w) > 1 else None

    def double(self) -> Problem:
        def convert(value: object) -> object:
            return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

        return Problem(**{field.name: convert(getattr(self, field.name)) for field in dataclasses.fields(self)})


def problem(
    rows: int,
    hidden: int,
    vocab: int,
    dtype: torch.dtype,
    *,
    indexed: int = 1,
    bias: bool = False,
    class_weight: bool = False,
    class_sum: bool = False,
    scale: float = 1.0,
    idle: float = 0.0,
    size: float = 1.0,
    transform: str = "",
    entropy: bool = False,
    seed: int = 0,
) -> Problem:
    """Random operands; a share ``idle`` of rows has no index and zero upstream gradients of size ``size``.

    The hidden size is made to ``fit`` the route.
    """
    hidden = fit(hidden)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    index = torch.randint(-1, vocab, (rows, indexed), generator=generator)
    works = torch.rand(rows, generator=generator) >= idle
    index = torch.where(works[:, None], index, -1)
    made = Problem(
        x=normal(rows, hidden).to(dtype),
        w=(normal(vocab, hidden) * (3 / hidden**0.5)).to(dtype),
        bias=normal(vocab).to(dtype) if bias else None,
        index=index,
        class_weight=torch.rand(vocab, generator=generator) if class_weight else None,
        scale=scale,
        want_class_sum=class_sum,
        g_lse=normal(rows) * works * size,
        g_picked=normal(rows, indexed) * works[:, None] * size,
        g_class_sum=normal(rows) * works * size / vocab if class_sum else None,
        transform=transform,
        g_entropy=normal(rows) * works * size if entropy else None,
    )
    for field in dataclasses.fields(made):
        value = getattr(made, field.name)
        if isinstance(value, Tensor):
            setattr(made, field.name, value.to(DEVICE))
    if rows:
        assert gpu.GpuOperands.of(*made.operands, "").is_described() == (
            route == "described" and tiles.has_descriptors(made.x)
        )
    return made


def eager_gradients(p: Problem, *, of_loss: bool = False) -> list[Tensor]:
    """Gradients of input, weight and bias as eager PyTorch gives them: logits in the operands' dtype.

    The upstream gradients of ``picked`` and ``class_sum`` are those of log-probabilities if ``of_loss``.
    """
    leaves = [t.detach().clone().requires_grad_() for t in (p.x, p.w, p.bias) if t is not None]
    z = apply(decode(p.transform), F.linear(*leaves) * p.scale).float()
    read = z.log_softmax(1) if of_loss else z
    picked = read.gather(1, p.index.clamp(min=0)) * (p.index >= 0)
    total = (picked * p.g_picked).sum()
    if not of_loss:
        total = total + (z.logsumexp(1) * p.g_lse).sum()
    if p.g_class_sum is not None and not (of_loss and len(p.w) == 1):
        total = total + ((read if p.class_weight is None else read * p.class_weight).sum(1) * p.g_class_sum).sum()
    if p.g_entropy is not None:
        total = total - ((z.softmax(1) * z.log_softmax(1)).sum(1) * p.g_entropy).sum()
    return list(torch.autograd.grad(total, leaves))


def error(got: Tensor, want: Tensor) -> float:
    """The largest error over the largest value; where the reference is not finite, the same must have come."""
    assert got.shape == want.shape
    finite = want.isfinite()
    assert torch.equal(got[~finite].double().nan_to_num(), want[~finite].nan_to_num())
    assert torch.equal(got.isnan(), want.isnan())
    if not bool(finite.any()):
        return 0.0
    difference = (got[finite].double() - want[finite]).abs().max()
    return float(difference / want[finite].abs().max().clamp(min=1e-30))


def check_stats(
    p: Problem, *, skip_unindexed: bool = False, bound: float = STATS_BOUND, **wanted: bool
) -> tuple[Tensor, ...]:
    """Those that are always there, and those that are ``wanted``; returns what came."""
    arguments, options = (p.want_class_sum, skip_unindexed), {"transform": p.transform, **wanted}
    got = cuda.linear_stats(*p.operands, *arguments, **options)
    want = reference.linear_stats(*p.double().operands, *arguments, **options)
    names = ("lse", "picked", "log_prob", "class_sum", "log_prob_sum", "residual", "expectation", "entropy", "top")
    for name, g, r in zip(names, got, want, strict=False):
        assert g.dtype == torch.float32
        if name != "residual":
            assert error(g, r) <= bound, (name, error(g, r))
    assert got[9].dtype == torch.int64 and got[9].shape == want[9].shape
    assert len(set(map(id, got))) == len(got)  # one result of an op may not be another
    return got


def check_gradients(p: Problem, *, floor: float = 1.0, memory: int = 0) -> None:
    """The backward of the statistics, and a loss with the same coefficients.

    ``floor`` multiplies the floor of the bound: where sums have few terms, eager's rounding may cancel by luck.
    """
    dtype, exact, options = p.x.dtype, p.double(), {"transform": p.transform}
    needs = (True, True, p.bias is not None)
    wanted = {"want_entropy": p.g_entropy is not None}
    exact_lse, *_, exact_entropy, _, _ = reference.linear_stats(*exact.operands, False, False, **options, **wanted)
    arguments = *exact.operands, exact_lse, exact_lse * 0, *exact.upstream, *needs
    entropies = {} if p.g_entropy is None else {"entropy": exact_entropy, "g_entropy": exact.g_entropy}
    want = reference.linear_stats_backward(*arguments, **options, **entropies)

    def bounds(eager: list[Tensor], exact: tuple[Tensor, ...]) -> list[float]:
        return [1.5 * error(e, r) + floor * GRADIENT_FLOOR[dtype] for e, r in zip(eager, exact, strict=False)]

    allowed = bounds(eager_gradients(p), want)
    # The softmax adds up to one only with the lse of the very same products.
    lse, _, _, _, _, residual, _, entropy, *_ = cuda.linear_stats(*p.operands, False, False, **options, **wanted)
    entropies = {} if p.g_entropy is None else {"entropy": entropy, "g_entropy": p.g_entropy}
    arguments = *p.operands, lse, residual, *p.upstream, *needs
    got = cuda.linear_stats_backward(*arguments, memory=memory, **options, **entropies)
    for name, g, r, most in zip(("input", "weight", "bias"), got, want, allowed, strict=False):
        assert g.dtype == dtype
        assert error(g, r) <= most, (name, error(g, r), most)
    if p.g_entropy is not None:  # which no loss with coefficients has
        return

    loss, *got = cuda.linear_loss(*p.operands, *p.coefficients, *needs, **options)
    want_loss, *want = reference.linear_loss(*exact.operands, *exact.coefficients, *needs, **options)
    lse, _, log_prob, class_sum, log_prob_sum, *_ = reference.linear_stats(
        *exact.operands, p.want_class_sum, False, want_log_prob_sum=p.want_class_sum, **options
    )
    if route != "general" and p.want_class_sum:  # the difference of these, to the rounding of either
        log_prob_sum = class_sum.abs() + lse.abs() * (len(p.w) if p.class_weight is None else p.class_weight.sum())
    pairs = zip(exact.coefficients, (log_prob, log_prob_sum), strict=True)
    magnitude = sum(float((c * s).abs().nan_to_num(0, 0, 0).sum()) for c, s in pairs if c is not None)
    assert abs(float(loss) - float(want_loss)) <= STATS_BOUND * magnitude
    allowed = bounds(eager_gradients(p, of_loss=True), tuple(want))
    for name, g, r, most in zip(("input", "weight", "bias"), got, want, allowed, strict=False):
        assert g.dtype == (torch.float32 if dtype == torch.float16 else dtype)
        assert error(g, r) <= most, (name, error(g, r), most)


# --- shapes and options ---------------------------------------------------------------------------------------


@case(each_dtype=True, routes=ALL_ROUTES)
def plain(dtype: torch.dtype) -> None:
    p = problem(512, 512, 8192, dtype) if HAS_GPU else problem(32, 32, 128, dtype)
    check_stats(p)
    check_gradients(p)


@case(each_dtype=True)
def odd_everything(dtype: torch.dtype) -> None:
    rows, hidden, vocab = (333, 771, 50257) if HAS_GPU else (37, 21, 131)
    p = problem(
        rows, hidden, vocab, dtype, indexed=3, bias=True, class_weight=True, class_sum=True, scale=0.7, idle=0.3
    )
    check_stats(p)
    check_stats(p, skip_unindexed=True)
    check_gradients(p)


@case(each_dtype=True, routes=ALL_ROUTES)
def odd_vocabulary_with_every_option(dtype: torch.dtype) -> None:
    rows, hidden, vocab = (333, 771, 50257) if HAS_GPU else (37, 21, 131)
    options = {"bias": True, "class_weight": True, "class_sum": True}
    check_gradients(problem(rows, hidden, vocab, dtype, scale=-0.7, idle=0.3, **options))


@case(each_dtype=True)
def softcap(dtype: torch.dtype) -> None:
    rows, hidden, vocab = (333, 512, 8191) if HAS_GPU else (37, 32, 131)
    p = problem(rows, hidden, vocab, dtype, scale=1 / 4, transform="tanh mul:4.0", bias=True, idle=0.3)
    p.x[3] *= 30  # most of this row's logits are at the cap
    check_stats(p)
    check_gradients(p)


@case(each_dtype=True)
def bounded_logits(dtype: torch.dtype) -> None:
    """Whose exponentials are taken relative to an indexed one, not the largest; but not with a bound like 50."""
    shapes = ((333, 512, 8191), (40, 512, 8191), (333, 3072, 5003)) if HAS_GPU else ((37, 32, 131),)
    for rows, hidden, vocab in shapes:
        for transform, options in (
            ("tanh mul:30.0", {}),
            ("tanh mul:30.0", {"indexed": 0}),
            ("tanh mul:-30.0 add:5.0", {"indexed": 3, "bias": True, "idle": 0.3}),
            ("tanh mul:50.0", {}),
            ("softsign mul:30.0", {"bias": True}),
        ):
            p = problem(rows, hidden, vocab, dtype, scale=1 / 30, transform=transform, **options)
            p.x[3] *= 1000  # most of this row's logits are at a bound, or at the other
            # A class that is nearly certain: some 10 above the others' log-sum-exp.
            at, certain = p.x[5].abs().argmax(), 30 * math.atanh((14.5 + math.log(vocab)) / 30)
            p.w[7] = 0
            p.w[7, at] = certain / float(p.x[5, at])
            p.index[5:6] = 7
            *_, log_prob, _, _, _, _, _, _, _ = check_stats(p, skip_unindexed=bool(options.get("idle")))
            exact = reference.linear_stats(*p.double().operands, False, False, transform=p.transform)[2]
            if transform == "tanh mul:30.0" and log_prob.numel():
                assert -1e-3 < exact[5, 0] < -1e-6
                assert abs(log_prob[5, 0] - exact[5, 0]) < 5e-7  # a few roundings of what is near one
            p.x[2] = float("nan")
            lse = cuda.linear_stats(*p.operands, False, False, transform=transform)[0]
            assert lse.isnan().nonzero().flatten().tolist() == [2]


@case(each_dtype=True)
def mask_after_softcap(dtype: torch.dtype) -> None:
    rows, hidden, vocab = (333, 512, 8191) if HAS_GPU else (37, 32, 131)
    for scale, masked, options in (
        (1 / 4, "-inf", {}),
        (-1 / 4, "-inf", {}),
        (1 / 4, "-9.0", {"class_sum": True}),
        (1 / 4, "-9.0 mul:0.5", {"indexed": 2}),
    ):
        transform = f"tanh mul:4.0 masked:{masked}"
        p = problem(rows, hidden, vocab, dtype, scale=scale, transform=transform, bias=True, **options)
        p.bias[::7] = -float("inf") / scale
        p.index -= (p.index % 7 == 0).long()  # but for a row: what is picked of a masked class is its number
        p.index[2] = 7
        check_stats(p)
        if masked == "-inf":
            p.g_picked[2] = 0.0
        check_gradients(p)


@case(routes=("described", "played"))
def kept_exponentials() -> None:
    dtype = torch.bfloat16 if HAS_GPU else torch.float32
    if not tiles.has_descriptors(torch.empty(0, 16, dtype=dtype, device=DEVICE)):
        return  # an older GPU keeps none
    many, few, hidden, vocab, more = (333, 200, 512, 8191, 8191) if HAS_GPU else (37, 20, 48, 131, 1100)
    for rows, classes, options in (
        (many, vocab, {}),
        (many, vocab, {"idle": 1.0}),
        (many, vocab, {"bias": True, "class_sum": True, "class_weight": True, "scale": 0.7, "idle": 0.3}),
        (many, vocab, {"bias": True, "scale": 1 / 4, "transform": "tanh mul:4.0"}),
        (many, vocab, {"indexed": 0, "class_sum": True}),
        # With few rows class sums are made in tiles, and what they give is added to the exponentials.
        (few, more, {"class_sum": True}),
        (few, vocab, {"bias": True, "class_sum": True, "class_weight": True, "scale": 0.7, "idle": 0.3}),
        (few, vocab, {"bias": True, "indexed": 0, "class_sum": True}),
        (few, vocab, {"class_sum": True, "scale": 0.0}),
    ):
        p = problem(rows, hidden, classes, dtype, **options)
        assert tiles.adds_class_sums(p.x) == (rows == few)
        p.x[5] *= 100  # the offset of this row is bad
        if p.g_class_sum is not None:
            p.g_picked[3:6] = 0.0  # rows with nothing but class sums
            p.g_class_sum[3:6] = 1.0 / classes
            total = classes if p.class_weight is None else p.class_weight.sum()
            # One whose gradient of the log-sum-exp cancels.
            p.g_class_sum[6] = -(p.g_picked[6] * (p.index[6] >= 0)).sum() / total
        known = {"transform": p.transform}
        loss, *kept = cuda.linear_loss_exponentials(*p.operands, *p.coefficients, **known)
        before = [t.clone() for t in kept]
        g = torch.full((), -3.0, device=DEVICE)
        for _ in range(2):  # what is kept survives a backward
            got = cuda.linear_loss_exponentials_backward(*p.operands, p.g_class_sum, g, *kept, True, True, True)
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(kept, before, strict=True))
        same_loss, *_ = cuda.linear_loss(*p.operands, *p.coefficients, False, False, False, **known)
        tripled = dataclasses.replace(p, g_picked=-3 * p.g_picked)
        if p.g_class_sum is not None:
            tripled.g_class_sum = -3 * p.g_class_sum
        exact = tripled.double()
        _, *want = reference.linear_loss(*exact.operands, *exact.coefficients, True, True, True, **known)
        eager = eager_gradients(tripled, of_loss=True)
        assert abs(float(loss) - float(same_loss)) <= 1e-5 * abs(float(same_loss)) + 1e-4
        for name, a, b, e in zip(("input", "weight", "bias"), got, want, [*eager, torch.zeros(classes)], strict=False):
            floor = GRADIENT_FLOOR[dtype]
            most = 1.5 * (error(e, b) if name != "bias" or p.bias is not None else 4e-3) + floor
            assert error(a, b) <= most, (options, name, error(a, b), most)


@case(routes=("played",))
def exponentials_of_a_weight_off_vectors() -> None:
    """It is copied, as where it lies was not known when it was chosen to keep exponentials; on a tape, too."""
    dtype = torch.bfloat16 if HAS_GPU else torch.float32
    p = problem(20, 32, 150, dtype)
    if not tiles.has_descriptors(p.x):
        return  # an older GPU keeps none
    off = torch.empty(p.w.numel() + 1, dtype=dtype, device=DEVICE)[1:].view_as(p.w).copy_(p.w)
    results = []
    for w in (p.w, off):
        operands = p.x, w, *p.operands[2:]
        loss, *kept = cuda.linear_loss_exponentials(*operands, *p.coefficients)
        g = torch.ones((), device=DEVICE)
        results.append([loss, *cuda.linear_loss_exponentials_backward(*operands, None, g, *kept, True, True, False)])
    for aligned, moved in zip(*results, strict=True):
        assert torch.equal(aligned, moved)


@case(each_dtype=True)
def no_coefficients_of_sums_are_zeros(dtype: torch.dtype) -> None:
    rows, hidden, vocab = (300, 512, 5000) if HAS_GPU else (37, 48, 131)
    p = problem(rows, hidden, vocab, dtype, bias=True, idle=0.3)
    without, with_zeros = (
        cuda.linear_loss(*p.operands, p.g_picked, c, True, True, True) for c in (None, torch.zeros_like(p.g_lse))
    )
    for one, other in zip(without, with_zeros, strict=True):
        # A sum with a zero in it may be rounded once more, in float32, which may round it to another neighbour.
        assert bool(one.any())
        most = STATS_BOUND * float(other.abs().max())
        torch.testing.assert_close(one, other, rtol=max(torch.finfo(one.dtype).eps, STATS_BOUND), atol=most)


@case(each_dtype=True)
def transforms_with_every_option(dtype: torch.dtype) -> None:
    rows, hidden, vocab = (200, 512, 5001) if HAS_GPU else (37, 32, 131)
    options = {"bias": True, "class_weight": True, "idle": 0.3}
    for transform in ("tanh mul:5.0 add:-0.5", "add:5.0 mul:0.4 sigmoid mul:9.0"):
        for indexed, class_sum in ((1, True), (2, True), (2, False)):
            p = problem(
                rows,
                hidden,
                vocab,
                dtype,
                scale=-0.3,
                transform=transform,
                indexed=indexed,
                class_sum=class_sum,
                **options,
            )
            check_stats(p)
            check_gradients(p)
    p = problem(rows, hidden, vocab, dtype, class_sum=True, transform="sigmoid")
    check_stats(p)  # with columns past the vocabulary, where the sigmoid of nothing is a half


@case()
def tanh_is_as_exact_near_zero_as_far_from_it() -> None:
    u = torch.cat([torch.logspace(-30, 2, 500), torch.linspace(0.2, 0.3, 99), torch.tensor([0.0, 1e30])])
    x = u.to(DEVICE)[:, None] * torch.ones(1, fit(16), device=DEVICE)
    w = torch.zeros(4, x.shape[1], device=DEVICE)
    w[1, 0], w[2, 0] = 1, -1
    index = torch.tensor([[1, 2]], device=DEVICE).expand(len(u), 2).contiguous()
    picked = cuda.linear_stats(x, w, None, index, None, 1.0, False, False, transform="tanh")[1]
    want = x[:, :1].double().tanh()
    assert ((picked.double() - want * torch.tensor([1.0, -1.0], device=DEVICE)).abs() <= 4e-7 * want).all()


@case(routes=("described",))
def tanh_of_16_bits_errs_less_than_they_round() -> None:
    """By 4e-7 at most; and with slopes that keep their digits where most of a large logit is cut off."""
    x = torch.cat([torch.linspace(-12, 12, 4001), torch.logspace(-20, 4, 99), torch.tensor([0.0, 6e4])])
    x = x.to(torch.float16)[:, None].to(DEVICE) * torch.ones(1, 16, dtype=torch.float16, device=DEVICE)
    w = torch.zeros(4, 16, dtype=torch.float16, device=DEVICE)
    w[1, 0] = 1
    index = torch.ones(len(x), 1, dtype=torch.int64, device=DEVICE)
    exact = x[:, :1].double()
    for factor in (60.0, 1000.0):  # of which the second has no room for such errors
        transform = f"tanh mul:{factor}"
        lse, picked, _, _, _, residual, *_ = cuda.linear_stats(
            x, w, None, index, None, 1.0, False, False, transform=transform
        )
        bound = 4e-7 if factor == 60 else 4e-7 * exact.tanh().abs()
        assert ((picked.double() / factor - exact.tanh()).abs() <= bound).all()
        if factor == 60:
            nothing, ones = torch.zeros_like(lse), torch.ones_like(picked)
            upstream = nothing, ones, None
            (dx, *_) = cuda.linear_stats_backward(
                x,
                w,
                None,
                index,
                None,
                1.0,
                lse,
                residual,
                *upstream,
                True,
                False,
                False,
                transform=transform,
            )
            slope = factor / exact[:, 0].cosh().square()
            # Where float16 has all of its digits: of a tanh near 1 a slope of 1 - tanh * tanh has too few by then.
            seen = (slope > 1e-4) & ((exact[:, 0] > 0) | (slope > 0.2))
            assert ((dx[:, 0].double() - slope).abs() <= 2e-3 * slope)[seen].all()  # three roundings


@case(each_dtype=True)
def gradients_that_nearly_cancel(dtype: torch.dtype) -> None:
    # Targets drawn from the softmax itself: what the targets and what the softmax give is much larger than their sum.
    rows, hidden, vocab = (4000, 64, 60) if HAS_GPU else (200, 16, 40)
    p = problem(rows, hidden, vocab, dtype)
    p.x += 1
    z, _ = reference.logits(p.x.double(), p.w.double(), None, 1.0, "")
    p.index = z.softmax(1).multinomial(1)
    p.g_lse[:], p.g_picked[:] = 1 / rows, -1 / rows
    check_gradients(p)


@case(each_dtype=True)
def no_index(dtype: torch.dtype) -> None:
    p = problem(40, 48, 200, dtype, indexed=0, class_sum=True)
    check_stats(p)
    check_gradients(p)
    assert all(not t.any() for t in cuda.linear_stats(*p.operands, True, True))


@case(each_dtype=True)
def one_row_of_a_large_vocabulary(dtype: torch.dtype) -> None:
    p = problem(1, 256, 100_003, dtype, bias=True) if HAS_GPU else problem(1, 24, 1003, dtype, bias=True)
    check_stats(p)
    check_gradients(p)


@case(each_dtype=True)
def a_handful_of_rows(dtype: torch.dtype) -> None:
    p = problem(50, 640, 32_000, dtype, scale=-1.5) if HAS_GPU else problem(3, 40, 97, dtype, scale=-1.5)
    check_stats(p)
    check_gradients(p)


@case(each_dtype=True)
def tiny_sizes(dtype: torch.dtype) -> None:
    for rows, hidden, vocab in ((1, 1, 1), (2, 1, 3), (1, 5, 2), (17, 16, 33)):
        p = problem(rows, hidden, vocab, dtype, bias=True, class_sum=True)
        check_stats(p)
        check_gradients(p, floor=6)  # with one class, eager's softmax is exactly one


@case(each_dtype=True)
def strides(dtype: torch.dtype) -> None:
    rows, hidden, vocab = (200, fit(136), 3008) if HAS_GPU else (20, fit(24), 96)
    p = problem(rows, hidden, vocab, dtype)
    transposed = dataclasses.replace(p, w=p.w.t().contiguous().t())
    assert transposed.w.stride() == (1, vocab)
    sliced = dataclasses.replace(p, x=torch.stack((p.x, p.x + 1), 2)[:, :, 0], w=torch.cat((p.w, p.w), 1)[:, :hidden])
    expanded = dataclasses.replace(p, x=p.x[:1].expand(rows, hidden), g_lse=p.g_lse[:1].expand(rows))
    # Which a descriptor describes as they are, or does not.
    columns = dataclasses.replace(p, x=torch.cat((p.x, p.x), 1)[:, :hidden])
    shifted = dataclasses.replace(p, x=torch.cat((p.x, p.x), 1)[:, 1 : 1 + hidden])
    for strided in (transposed, sliced, expanded, columns, shifted):
        check_stats(strided)
        check_gradients(strided)
        x, index, c = strided.x[:7], strided.index[:7], strided.g_picked[:7].abs()
        loss, *_ = cuda.linear_loss(x, strided.w, None, index, None, 1.0, c, None, *[False] * 3)
        exact = x.double(), strided.w.double(), None, index, None, 1.0, c.double(), None, *[False] * 3
        assert error(loss, reference.linear_loss(*exact)[0]) <= STATS_BOUND


@case(each_dtype=True)
def the_same_shapes_at_other_addresses(dtype: torch.dtype) -> None:
    p = problem(40, 48, 96, dtype, bias=True, class_weight=True, class_sum=True)
    check_gradients(p)
    moved = {}
    for field in dataclasses.fields(p):
        value = getattr(p, field.name)
        if isinstance(value, Tensor) and field.name != "w":
            moved[field.name] = torch.cat((value.flatten()[:1], value.flatten()))[1:].view(value.shape)
            assert moved[field.name].data_ptr() % 16
    check_stats(dataclasses.replace(p, **moved))
    check_gradients(dataclasses.replace(p, **moved))


@case(routes=("general",))
def several_windows_along_either_axis() -> None:
    sizes = (windows.LEAST_WINDOW_BYTES, windows.MOST_WINDOW_BYTES, windows.LEAST_WINDOW, general.MOST_PRODUCT_BYTES)
    most = 32 * 40 * 4
    try:
        windows.LEAST_WINDOW_BYTES, windows.MOST_WINDOW_BYTES, windows.LEAST_WINDOW = 0, most, 32
        general.MOST_PRODUCT_BYTES = most  # of chunks in float32
        for rows, vocab in ((40, 150), (150, 40)):
            at_rows, at_vocab = windows.windows_of(rows, vocab, 4, 0)
            assert (len(at_rows) > 2) == (rows > vocab) and (len(at_vocab) > 2) == (vocab > rows)
            for dtype in DTYPES:
                check_gradients(
                    problem(rows, 24, vocab, dtype, indexed=2, bias=True, class_weight=True, class_sum=True)
                )
    finally:
        windows.LEAST_WINDOW_BYTES, windows.MOST_WINDOW_BYTES, windows.LEAST_WINDOW, general.MOST_PRODUCT_BYTES = sizes


@case(routes=("general",))
def products_in_float32() -> None:
    """One for statistics, three for a loss with its gradients, and three for gradients of statistics."""
    for rows, hidden, vocab in ((40, 24, 160), (151, 24, 48)):
        p = problem(rows, hidden, vocab, torch.float32)
        lse, _, _, _, _, residual, *_ = cuda.linear_stats(*p.operands, False, False)
        with FlopCounterMode(display=False) as counter:
            cuda.linear_stats(*p.operands, False, False)
            cuda.linear_loss(*p.operands, *p.coefficients, True, True, False)
            cuda.linear_stats_backward(*p.operands, lse, residual, *p.upstream, True, True, False)
        assert counter.get_total_flops() == (1 + 3 + 3) * 2 * p.x.numel() * vocab


@case(each_dtype=True, routes=tuple(way for way in ROUTES if way != "general"))
def several_chunks_and_windows(dtype: torch.dtype) -> None:
    from fxfuse.ops import hopper

    sizes = (hopper.MOST_EXPONENTIALS_BYTES, hopper.LEAST_WINDOW_BYTES, tiles.LEAST_FILL)
    rows, vocab = (1500, 5000) if HAS_GPU else (50, 300)
    chunk = rows // 4
    try:
        tiles.LEAST_FILL = 0.0  # for d_input's sums in the order of the list
        hopper.MOST_EXPONENTIALS_BYTES = chunk * vocab * dtype.itemsize
        hopper.LEAST_WINDOW_BYTES = chunk * vocab * dtype.itemsize
        options = {"bias": True, "class_weight": True, "class_sum": True}
        # The larger ones take kernels of their own on a GPU, of 16-bit operands.
        for hidden in ((256, 896, 2064) if dtype != torch.float32 else (256,)) if HAS_GPU else (16,):
            check_gradients(problem(rows, hidden, vocab, dtype, **options))
            check_gradients(problem(rows, hidden, vocab, dtype, idle=0.8, indexed=2, **options))
            for idle in (0.97, 1.0):  # fewer rows than there are columns of tiles to share the bias among, and none
                check_gradients(problem(rows, hidden, vocab, dtype, idle=idle, bias=True))
            check_gradients(problem(vocab, hidden, rows, dtype, idle=0.4, **options))
        check_gradients(problem(rows, 3008 if HAS_GPU else 112, vocab, dtype, idle=0.2, **options))
        tiles.LEAST_FILL = 2.0  # never in the order of the list
        check_gradients(problem(rows, 2048 if HAS_GPU else 16, vocab, dtype, idle=0.2, indexed=2, **options))
    finally:
        hopper.MOST_EXPONENTIALS_BYTES, hopper.LEAST_WINDOW_BYTES, tiles.LEAST_FILL = sizes


@case(routes=("described",))
def the_lower_bits_of_sums_lie_as_threads_have_them() -> None:
    from fxfuse.kernels.hopper.products import lower_at

    height, width = 128, 144  # the last pieces of a row are not full
    row, col = torch.arange(height)[:, None], torch.arange(width)[None, :]
    piece = row // 64 * 3 + col // 64
    # A warp has 16 rows of a product, a thread two neighbours of every 8 columns in two of these rows, 8 apart.
    warp, half, thread, pair = row % 64 // 16, row % 16 // 8, row % 8 * 4 + col % 8 // 2, col % 64 // 8
    expected = piece * 4096 + half * 2048 + (warp * 32 + thread) * 16 + pair * 2 + col % 2
    assert torch.equal(lower_at.fn(row, col, width, True), expected)
    assert expected.unique().numel() == height * width
    assert torch.equal(lower_at.fn(row, col, width, False), row * width + col)


@case(each_dtype=True, routes=("described",))
def a_nan_of_either_sign_stays_in_sums_of_several_chunks(dtype: torch.dtype) -> None:
    from fxfuse.ops import hopper

    sizes = (hopper.MOST_EXPONENTIALS_BYTES, hopper.LEAST_WINDOW_BYTES, tiles.LEAST_FILL)
    rows, vocab = (5000, 1500) if HAS_GPU else (300, 50)
    nans = torch.full((2,), float("nan")).to(dtype)
    nans.view(torch.int32 if dtype == torch.float32 else torch.int16)[1] = -1  # all bits
    try:
        hopper.MOST_EXPONENTIALS_BYTES = hopper.LEAST_WINDOW_BYTES = rows // 4 * vocab * dtype.itemsize
        for hidden in (256, 896, 2064) if HAS_GPU else (16,):
            for nan in nans:
                p = problem(rows, hidden, vocab, dtype)
                p.x[1, 3] = nan
                assert p.x[1, 3].isnan()
                _, _, d_weight, _ = cuda.linear_loss(*p.operands, *p.coefficients, True, True, False)
                assert d_weight.isnan().all()
                # Here the hidden states are multiplied as they are.
                lse, _, _, _, _, residual, *_ = cuda.linear_stats(*p.operands, False, False)
                arguments = *p.operands, lse, residual, *p.upstream, True, True, False
                assert cuda.linear_stats_backward(*arguments)[1].isnan().all()
                # Windows of classes, so that d_input is what is added up: a row of it is one of NaN.
                tiles.LEAST_FILL = 0.0
                p = problem(rows // 5, hidden, vocab * 3, dtype)
                p.x[1, 3] = nan
                lse, _, _, _, _, residual, *_ = cuda.linear_stats(*p.operands, False, False)
                d_input = cuda.linear_stats_backward(
                    *p.operands, lse, residual, *p.upstream, True, True, False, memory=1
                )[0]
                assert d_input[1].isnan().all() and d_input[2:].isfinite().all()
    finally:
        hopper.MOST_EXPONENTIALS_BYTES, hopper.LEAST_WINDOW_BYTES, tiles.LEAST_FILL = sizes


@case(each_dtype=True)
def little_memory(dtype: torch.dtype) -> None:
    from fxfuse.ops import hopper

    sizes = (hopper.WIDE_WINDOW, hopper.LEAST_CLASSES, hopper.LEAST_ROWS, tiles.LEAST_FILL)
    rows, vocab = (1500, 5000) if HAS_GPU else (50, 300)
    try:
        hopper.WIDE_WINDOW, hopper.LEAST_CLASSES, hopper.LEAST_ROWS = vocab, vocab // 4, rows // 3
        tiles.LEAST_FILL = 0.0
        options = {"bias": True, "class_weight": True, "class_sum": True, "indexed": 2}
        for hidden in (256, 896, 2064) if HAS_GPU else (16,):  # the larger ones have kernels of their own, as above
            check_gradients(problem(rows, hidden, vocab, dtype, **options), memory=1)
            check_gradients(problem(rows, hidden, vocab, dtype, idle=0.8, **options), memory=1)
            check_gradients(problem(vocab, hidden, rows, dtype, transform="tanh mul:3.0"), memory=1)
    finally:
        hopper.WIDE_WINDOW, hopper.LEAST_CLASSES, hopper.LEAST_ROWS, tiles.LEAST_FILL = sizes


@case(gpu_only=True, routes=("general",))
def little_memory_in_float32() -> None:
    """Nearly certain rows, whose errors cancel if the logits of gradients are rounded as those of statistics are."""
    p = problem(4096, 1024, 20_000, torch.float32, scale=3.3)
    for mebibytes in (16, 64, 256):
        check_gradients(p, memory=mebibytes << 20)


@case(each_dtype=True, routes=("described",))
def rows_go_from_the_order_of_the_list_to_where_they_are_from(dtype: torch.dtype) -> None:
    from fxfuse.kernels.hopper.launch import Rows

    p = problem(100, 48, 32, dtype)
    call = gpu.GpuOperands.of(*p.operands, "").call()
    values = torch.arange(100.0, device=p.x.device)[:, None].expand(100, call.hidden) + 1
    generator = torch.Generator().manual_seed(0)
    for count in (0, 1, 40, 99, 100):
        listed = torch.randperm(100, generator=generator)[:count].sort().values.to(p.x.device, torch.int32)
        order = torch.cat((listed, listed.new_zeros(100 - count)))
        expected = torch.zeros(100, call.hidden, dtype=dtype, device=p.x.device)
        expected[listed.long()] = values[:count].to(dtype)
        for most in (16, 48, 112):
            d_input = values.to(dtype, copy=True)
            rows = Rows(order, listed.new_tensor([count]), most, -(-100 // most))
            call.unlist(rows, d_input, call.empty(most, call.hidden, dtype=dtype))
            assert torch.equal(d_input, expected), (count, most)


@case(each_dtype=True, routes=ALL_ROUTES)
def gradients_that_are_not_needed(dtype: torch.dtype) -> None:
    p = problem(20, 24, 90, dtype, bias=True)
    lse = cuda.linear_stats(*p.operands, False, False)[0]
    full = cuda.linear_stats_backward(*p.operands, lse, lse * 0, *p.upstream, True, True, True)
    for wanted in range(3):
        needs = [i == wanted for i in range(3)]
        some = cuda.linear_stats_backward(*p.operands, lse, lse * 0, *p.upstream, *needs)
        for have, need, all_of_it in zip(some, needs, full, strict=True):
            assert torch.equal(have, all_of_it if need else all_of_it.new_zeros((0,)))


@case()
def each_upstream_alone() -> None:
    for alone in range(3):
        p = problem(20, 24, 90, torch.float32, class_sum=True)
        for i, g in enumerate(p.upstream):
            if i != alone:
                g.zero_()
        check_gradients(p)


@case(each_dtype=True)
def one_class_several_times_in_a_row(dtype: torch.dtype) -> None:
    p = problem(40, 24, 90, dtype, indexed=4, class_sum=True)
    p.index[:, 2] = p.index[:, 0]
    p.index[::3] = p.index[::3, :1].clone()
    check_stats(p)
    check_gradients(p)


@case(each_dtype=True)
def one_class_is_all_there_is(dtype: torch.dtype) -> None:
    # The log-sum-exp is then the logit itself, though they come from products of other shapes. Logits above 4 that
    # differ in their last bit differ by more than this.
    shapes = ((300, 1000, True), (300, 4096, False), (16, 4096, False), (1, 4096, False), (40, 1024, True))
    shapes = shapes if HAS_GPU else ((40, 48, True), (1, 48, False))
    kinds = (3.0, "", 0), (0.3, "tanh mul:30.0", 0), (1.0, "", 6)
    for (rows, hidden, bias), (scale, transform, spread) in itertools.product(shapes, kinds):
        p = problem(rows, hidden, 1, dtype, bias=bias, scale=scale)
        p.x *= torch.randint(-spread, spread + 1, p.x.shape, device=DEVICE).exp2().to(dtype)  # of terms of all sizes
        p.index[:] = 0
        lse, picked, log_prob, _, _, residual, *_ = cuda.linear_stats(*p.operands, False, False, transform=transform)
        assert rows == 1 or picked.abs().max() > 8
        assert float(((lse.double() + residual.double()) - picked[:, 0].double()).abs().max()) < 4e-7
        assert float(log_prob.abs().max()) < 4e-7 and float(log_prob.max()) <= 0
        ones = torch.ones(rows, 1, device=DEVICE)
        loss, *_ = cuda.linear_loss(*p.operands, ones, None, True, True, True, transform=transform)
        assert -4e-7 * rows < float(loss) <= 0


# --- logits far from any offset -------------------------------------------------------------------------------


@case(each_dtype=True)
def targets_far_below_the_largest_logit(dtype: torch.dtype) -> None:
    for share in (0.1, 1.0):
        rows, hidden, vocab = (150, 64, 500) if HAS_GPU else (40, 32, 110)
        p = problem(rows, hidden, vocab, dtype, bias=True, class_sum=True, scale=15.0)
        z, _ = reference.logits(p.x.double(), p.w.double(), p.bias.double(), p.scale, "")
        far = torch.arange(rows, device=DEVICE) < share * rows
        p.index[far] = z.argmin(1)[far, None]
        assert bool((z.amax(1) - z.gather(1, p.index.clamp(min=0)).amax(1) > 80)[far].all())
        check_stats(p)
        check_gradients(p)


@case(each_dtype=True)
def logits_that_are_all_large(dtype: torch.dtype) -> None:
    for shift in (-200.0, 200.0):
        p = problem(40, 48, 200, dtype, indexed=0, bias=True)
        p.bias += shift
        check_stats(p)
        check_gradients(p)


@case(each_dtype=True)
def coefficients_that_vary_widely(dtype: torch.dtype) -> None:
    p = problem(64, 48, 200, dtype, class_sum=True)
    p.g_lse *= torch.logspace(-20, 3, 64, device=DEVICE)
    p.g_lse[5], p.g_picked[6] = 0, 0
    check_gradients(p)


@case(routes=("described", "played"))
def factors_that_a_scale_makes_small() -> None:
    """It is the factor times the scale that hidden states, which are large then, are multiplied by."""
    dtype = torch.bfloat16 if HAS_GPU else torch.float32
    p = problem(64, 48, 200, dtype, scale=1e-18, size=1e-24)
    p.x *= 1e18
    check_gradients(p)


# --- entropy and top ------------------------------------------------------------------------------------------
# The described way has neither: what asks for them takes the general one, for operands of either kind.

BOTH = {"want_entropy": True, "want_top": True}
ALL = {"want_log_prob_sum": True, "want_expectation": True, **BOTH}


@case(each_dtype=True)
def entropy_and_top(dtype: torch.dtype) -> None:
    p = problem(512, 512, 8192, dtype, entropy=True) if HAS_GPU else problem(32, 32, 128, dtype, entropy=True)
    for wanted in (*({name: True} for name in ALL if name != "want_top"), {"want_top": True}, BOTH, ALL):
        *_, argmax = check_stats(p, **wanted)
    z, _ = reference.logits(p.x.double(), p.w.double(), None, 1.0, "")
    assert torch.equal(argmax, z.argmax(1))
    check_gradients(p)


@case(each_dtype=True)
def entropy_and_top_with_every_option(dtype: torch.dtype) -> None:
    rows, hidden, vocab = (333, 771, 50257) if HAS_GPU else (37, 21, 131)
    options = {"bias": True, "class_weight": True, "class_sum": True, "idle": 0.3, "entropy": True}
    for indexed, transform in ((3, ""), (0, ""), (1, "tanh mul:4.0"), (1, "add:5.0 mul:0.4 sigmoid mul:9.0")):
        p = problem(rows, hidden, vocab, dtype, indexed=indexed, scale=-0.3, transform=transform, **options)
        check_stats(p, **ALL)
        stats = check_stats(p, skip_unindexed=True, **ALL)
        skipped = ~(p.index >= 0).any(1)
        assert bool(skipped.any()) and not any(bool(t[skipped].any()) for t in stats)
        check_gradients(p)
        check_gradients(p, memory=1)


@case(each_dtype=True, routes=("general",))
def entropy_alone_has_its_gradient(dtype: torch.dtype) -> None:
    p = problem(40, 24, 90, dtype, indexed=0, entropy=True, idle=0.3)
    p.g_lse.zero_()
    check_gradients(p)
    p.x[0], p.x[1] = float("nan"), float("inf")
    p.g_entropy[:2] = 0
    stats = cuda.linear_stats(*p.operands, False, False, **BOTH)
    gradients = cuda.linear_stats_backward(
        *p.operands, stats[0], stats[5], *p.upstream, True, True, True, entropy=stats[7], g_entropy=p.g_entropy
    )
    assert bool(stats[7][:2].isnan().all()) and not gradients[0][:2].any()
    assert all(bool(g.isfinite().all()) and bool(g.any()) for g in gradients)


@case(each_dtype=True, routes=("general",))
def entropies_of_nearly_certain_and_of_far_away_logits(dtype: torch.dtype) -> None:
    for shift in (-200.0, 0.0, 200.0):
        for scale in (0.01, 15.0):
            p = problem(40, 48, 200, dtype, bias=True, entropy=True, scale=scale)
            p.bias += shift / scale
            entropy = cuda.linear_stats(*p.operands, False, False, want_entropy=True)[7]
            want = reference.linear_stats(*p.double().operands, False, False, want_entropy=True)[7]
            # An entropy cannot be better than the logits: eager's here are of float32 products.
            log_p = (F.linear(p.x.float(), p.w.float(), p.bias.float()) * scale).log_softmax(1)
            eager = -(log_p.exp() * log_p).sum(1)
            assert error(entropy, want) <= 1.5 * error(eager, want) + STATS_BOUND, (shift, scale)
            # Logits of 260 are rounded by up to 1.5e-5: a few of them make the largest error of a gradient.
            check_gradients(p, floor=5 if shift else 1)


@case(each_dtype=True, routes=("general",))
def the_entropy_of_a_certain_class(dtype: torch.dtype) -> None:
    rows, hidden, vocab = 24, fit(24), 97
    p = problem(rows, hidden, vocab, dtype, entropy=True)
    p.x.zero_()
    p.x[:, 0] = 2
    p.w.zero_()
    p.w[1:, 0] = -torch.linspace(4, 12, vocab - 1, device=DEVICE).to(dtype)
    entropy = cuda.linear_stats(*p.operands, False, False, **BOTH)[7].double()
    want = reference.linear_stats(*p.double().operands, False, False, **BOTH)[7]
    # The sum of the exponentials is just above one: the roundings of a tree of additions are all that may be lost.
    assert bool((want < 0.1).all()) and float((entropy - want).abs().max()) <= 4e-7
    check_gradients(p)
    p.w[1:, 0] *= 4  # exponentials that vanish beside 1
    entropy = cuda.linear_stats(*p.operands, False, False, **BOTH)[7].double()
    want = reference.linear_stats(*p.double().operands, False, False, **BOTH)[7]
    assert bool((entropy > 0).all()) and bool(((entropy - want).abs() <= 0.05 * want).all())


@case(each_dtype=True, routes=("general",))
def entropies_of_few_classes(dtype: torch.dtype) -> None:
    for rows, hidden, vocab in ((1, 1, 1), (2, 1, 3), (1, 5, 2), (17, 16, 33), (0, 24, 90)):
        p = problem(rows, hidden, vocab, dtype, bias=True, class_sum=True, entropy=True)
        stats = check_stats(p, **ALL)
        check_gradients(p, floor=6)
        if vocab == 1:
            assert not stats[7].any() and not stats[9].any()


@case(each_dtype=True)
def what_all_logits_of_a_row_have_in_common_cancels(dtype: torch.dtype) -> None:
    """Not from ``class_sum`` and ``lse``, but from the difference and the mean that are made of them."""
    rows, hidden, vocab = (300, 256, 5003) if HAS_GPU else (37, 24, 131)
    p = problem(rows, hidden, vocab, dtype, bias=True, class_sum=True, scale=0.01)
    p.bias.mul_(0.25).add_(4096.0)
    p.bias = p.bias.float()
    _, _, _, class_sum, log_prob_sum, *_ = cuda.linear_stats(*p.operands, True, False, want_log_prob_sum=True)
    want = reference.linear_stats(*p.double().operands, True, False, want_log_prob_sum=True)
    assert error(class_sum, want[3]) <= STATS_BOUND
    # Logits near 41 are rounded by 2e-6, of which sums of many have the mean.
    assert error(log_prob_sum, want[4]) <= (5e-7 if route == "general" else STATS_BOUND)
    p = problem(rows, hidden, vocab, dtype, scale=0.001)
    expectation = cuda.linear_stats(*p.operands, False, False, want_expectation=True)[6]
    want = reference.linear_stats(*p.double().operands, False, False, want_expectation=True)
    # Tensor cores' way adds it to the maximum, for 16 bits; float32 must be as near as eager.
    of_difference = error(want[0].float() - want[7].float(), want[6])
    assert error(expectation, want[6]) <= (2e-6 if route == "general" else of_difference / 10)
    g, none = torch.linspace(1, 2, rows), torch.zeros(rows, p.index.shape[1])

    def gradients(of: Any, p: Any, stats: Any) -> Any:
        one, nothing = g.to(stats[0]), none.to(stats[0])
        return of.linear_stats_backward(
            *p.operands, stats[0], stats[5], one, nothing, None, True, True, False, entropy=stats[7], g_entropy=-one,
            expectation=stats[6],
        )[:2]  # fmt: skip

    stats = cuda.linear_stats(*p.operands, False, False, want_expectation=True)
    for got, exact in zip(gradients(cuda, p, stats), gradients(reference, p.double(), want), strict=True):
        assert error(got, exact) <= (2e-6 if got.dtype == torch.float32 else 4 * torch.finfo(got.dtype).eps)


@case(each_dtype=True, routes=("general",))
def the_lowest_of_equal_classes(dtype: torch.dtype) -> None:
    rows, vocab = (200, 20_011) if HAS_GPU else (50, 531)
    p = problem(rows, 16, vocab, dtype, bias=True)
    p.x.zero_(), p.w.zero_()
    p.bias.copy_(torch.randint(-2, 2, (vocab,)))
    p.x[:, 0] = 1
    p.w[vocab // 3 :: 2, 0] = torch.randint(0, 2, (len(p.w[vocab // 3 :: 2]),)).to(p.w)  # all rows' largest are 2
    p.x[::3, 0] = 0  # but those of every third, which are 1
    *_, top, argmax = check_stats(p, **ALL)
    z, _ = reference.logits(p.x.double(), p.w.double(), p.bias.double(), 1.0, "")
    first = (z == z.amax(1, keepdim=True)).int().argmax(1)
    assert torch.equal(argmax, first) and len(first.unique()) == 2 and torch.equal(top.double(), z.amax(1))


@case(each_dtype=True, routes=("general",))
def entropy_and_top_of_rows_that_are_not_finite(dtype: torch.dtype) -> None:
    vocab = 3000 if HAS_GPU else 131

    def check(p: Problem) -> None:
        *_, argmax = check_stats(p, **ALL)
        z, _ = reference.logits(p.x.double(), p.w.double(), None if p.bias is None else p.bias.double(), 1.0, "")
        assert torch.equal(argmax, z.max(1).indices)

    p = problem(37, 24, vocab, dtype)
    p.x[3] = float("nan")
    p.x[20] = float("inf")
    p.x[21], p.x[21, 0] = 0, float("inf")  # both infinities among its logits
    check(p)
    for nans in ((), (vocab // 2, vocab - 1), (vocab - 1,), (0, vocab - 1)):
        p = problem(37, 24, vocab, dtype, bias=True)
        p.bias[: 2 * vocab // 3] = float("-inf")  # whole tiles, the first among them
        p.bias[-5:-2] = float("inf") if len(nans) == 1 else float("-inf")
        p.bias[list(nans)] = float("nan")
        check(p)
    p.bias[:] = float("-inf")
    check(p)


@case(each_dtype=True, routes=("general",))
def gradients_of_entropies_of_any_size(dtype: torch.dtype) -> None:
    for size in (1e-6, 1e3):  # more, and float16 could not hold the results
        p = problem(40, 24, 90, dtype, indexed=0, bias=True, entropy=True, scale=0.2)
        p.g_lse.zero_()
        p.g_entropy *= size
        check_gradients(p)


@case(routes=("general",))
def entropies_in_several_windows() -> None:
    sizes = (windows.LEAST_WINDOW_BYTES, windows.MOST_WINDOW_BYTES, windows.LEAST_WINDOW)
    try:
        windows.LEAST_WINDOW_BYTES, windows.MOST_WINDOW_BYTES, windows.LEAST_WINDOW = 0, 32 * 40 * 4, 32
        for rows, vocab in ((40, 150), (150, 40)):
            for dtype in DTYPES:
                check_gradients(problem(rows, 24, vocab, dtype, indexed=2, bias=True, class_sum=True, entropy=True))
    finally:
        windows.LEAST_WINDOW_BYTES, windows.MOST_WINDOW_BYTES, windows.LEAST_WINDOW = sizes


# --- rows without work ----------------------------------------------------------------------------------------


@case(each_dtype=True)
def no_rows(dtype: torch.dtype) -> None:
    p = problem(0, 24, 90, dtype, bias=True, class_sum=True)
    check_stats(p)
    loss, d_input, d_weight, d_bias = cuda.linear_loss(*p.operands, *p.coefficients, True, True, True)
    assert float(loss) == 0 and d_input.shape == p.x.shape
    assert d_weight.shape == p.w.shape and not d_weight.any() and not d_bias.any()


@case(each_dtype=True)
def all_rows_idle(dtype: torch.dtype) -> None:
    # Of more than 64 rows, and of many hidden units, other kernels are used on a GPU.
    for rows, hidden in ((40, 24), (100, 24), (100, 2064)) if HAS_GPU else ((40, 24),):
        p = problem(rows, hidden, 90, dtype, bias=True, class_sum=True, idle=1.1)
        p.x[3] = float("nan")
        assert all(not t.any() for t in cuda.linear_stats(*p.operands, True, True))
        for result in (
            cuda.linear_loss(*p.operands, *p.coefficients, True, True, True),
            cuda.linear_stats_backward(*p.operands, p.g_lse, p.g_lse, *p.upstream, True, True, True),
        ):
            assert all(not t.any() for t in result)


@case(each_dtype=True, routes=ALL_ROUTES)
def losses_alone(dtype: torch.dtype) -> None:
    """Of rows in one block of a tile, of which none is left out, and of more, and of few that one program ends."""
    hidden, vocab = (320, 3001) if HAS_GPU else (24, 97)
    options = (
        {},
        {"indexed": 0, "class_sum": True},
        {"indexed": 3, "bias": True, "scale": -0.5, "transform": "tanh mul:4.0", "class_sum": True},
        {"class_weight": True, "class_sum": True, "transform": "tanh mul:40.0 masked:-inf"},
    )
    sizes = [(rows, hidden) for rows in (1, 5, 16, 17, *((64, 65, 150, 400) if HAS_GPU else ()))]
    sizes += [(16, 16), *(((100, 2064),) if HAS_GPU else ())]  # as many rows as hidden units; the largest tiles
    for rows, hidden in sizes:
        for option, idle in itertools.product(options, (0.0, 0.4, 1.1)):
            p = problem(rows, hidden, vocab, dtype, idle=idle, **option)
            idle_rows = p.g_lse == 0
            for g in p.coefficients:
                if g is not None:
                    g.abs_()  # so that nothing cancels
            p.x[idle_rows] = float("nan")
            loss, *nothing = cuda.linear_loss(*p.operands, *p.coefficients, *[False] * 3, transform=p.transform)
            exact = p.double()
            exact.x[idle_rows] = 0
            want, *_ = reference.linear_loss(*exact.operands, *exact.coefficients, *[False] * 3, transform=p.transform)
            assert loss.shape == () and not any(t.numel() for t in nothing)
            assert error(loss, want) <= 4 * STATS_BOUND or float(want) == 0, (rows, option, idle)
            assert float(want) != 0 or float(loss) == 0


@case(each_dtype=True)
def an_idle_row_is_zero_whatever_its_logits(dtype: torch.dtype) -> None:
    p = problem(40, 24, 90, dtype, bias=True, class_sum=True)
    for g in p.upstream:
        g[5] = g[6] = 0
    p.x[5], p.x[6] = float("nan"), float("inf")
    lse = cuda.linear_stats(*p.operands, False, False)[0]
    assert not lse[5].isfinite() and not lse[6].isfinite() and lse[7].isfinite()
    for *_, d_input, _, d_bias in (
        cuda.linear_stats_backward(*p.operands, lse, lse * 0, *p.upstream, True, False, True),
        cuda.linear_loss(*p.operands, *p.coefficients, True, False, True),
    ):
        assert not d_input[5].any() and not d_input[6].any()
        assert d_input.isfinite().all() and d_input[7].any() and d_bias.isfinite().all()


# --- values that are not finite, and indices that are no classes ----------------------------------------------


@case(each_dtype=True)
def minus_infinite_bias(dtype: torch.dtype) -> None:
    vocab = 3000 if HAS_GPU else 131
    p = problem(37, 24, vocab, dtype, bias=True)
    p.bias[: 2 * vocab // 3] = float("-inf")  # whole tiles, the first among them
    p.bias[-5:-2] = float("-inf")
    p.index[0], p.index[1] = 4, vocab - 1
    check_stats(p)
    p.g_picked[:] = 0
    check_gradients(p)
    p.bias[:] = float("-inf")
    check_stats(p)


@case(each_dtype=True)
def rows_that_are_not_finite(dtype: torch.dtype) -> None:
    p = problem(37, 24, 131, dtype, indexed=2)
    p.x[3] = float("nan")
    p.x[20] = float("inf")
    p.x[21], p.x[21, 0] = 0, float("inf")  # both infinities among its logits
    p.index[21, 0] = int(p.w[:, 0].argmin())
    check_stats(p)
    check_stats(p, skip_unindexed=True)
    assert cuda.linear_stats(*p.operands, False, False)[0][21] == float("inf")


@case(each_dtype=True)
def a_softcap_of_infinite_rows(dtype: torch.dtype) -> None:
    """Where no logit is infinite, nor may what tiles have past the vocabulary be."""
    for weighted in (False, True):
        p = problem(100, 24, 131, dtype, class_sum=True, class_weight=weighted, transform="tanh mul:4.0")
        p.w[p.w == 0] = 1
        p.x[7], p.x[20] = float("inf"), 0
        p.x[20, 0] = -float("inf")
        p.x[7, 1:] = 0
        check_stats(p)
        check_stats(p, want_entropy=True)


def tiles_with_less_l2() -> Any:
    """Let tiles be chosen as on a device with less L2, where more kernels share tiles."""
    machine = tiles.machine(DEVICE)._replace(less_l2=True)
    return mock.patch.object(tiles, "machine", lambda device: machine)


@case(each_dtype=True, gpu_only=True, routes=("described", "played"))
def statistics_of_many_hidden_units(dtype: torch.dtype) -> None:
    """Those of large tiles: maxima and sums alone of many hidden units, in one or several chunks of rows."""
    check_statistics_of_large_tiles(
        dtype, (65, 1536, 144), (300, 2064, 5008), (700, 4096, 256), (1500, 1552, 16400), (6500, 2048, 8208)
    )


@case(each_dtype=True, gpu_only=True, routes=("described", "played"))
def statistics_of_many_hidden_units_with_less_l2(dtype: torch.dtype) -> None:
    with tiles_with_less_l2():
        check_statistics_of_large_tiles(
            dtype, (65, 768, 144), (300, 784, 5008), (700, 1280, 256), (1500, 896, 16400), (12000, 1024, 8208)
        )


def check_statistics_of_large_tiles(dtype: torch.dtype, *shapes: tuple[int, int, int]) -> None:
    for rows, hidden, vocab in shapes:
        for kind in ("plain", "scaled", "bias", "wide bias", "transposed", "idle"):
            scale, idle = -1.5 if kind in ("scaled", "bias") else 1.0, 0.6 if kind == "idle" else 0.0
            p = problem(rows, hidden, vocab, dtype, scale=scale, idle=idle, bias="bias" in kind)
            if p.bias is not None:
                p.bias = p.bias.to(torch.float32 if kind == "wide bias" else dtype)
                p.bias[7] = float("inf") if scale < 0 else -float("inf")  # a class that is masked
                p.index[p.index == 7] = 8
            if kind == "transposed":
                p.w = p.w.t().contiguous().t()
                assert dtype == torch.float32 or gpu.GpuOperands.of(*p.operands, "").is_described()
            p.x[3], p.x[20], p.x[21] = float("nan"), float("inf"), 0
            p.x[21, 0], p.index[21, 0] = float("inf"), int(p.w[:, 0].argmin())
            check_stats(p, skip_unindexed=kind == "idle", bound=2 * STATS_BOUND)  # sums have more terms than elsewhere
    processors = tiles.machine(DEVICE).processors
    cuts = [
        tiles.spans_of_stats(tiles.MAXIMA_AND_SUMS, rows, hidden, 2, vocab, processors)
        for rows, hidden, vocab in shapes
    ]
    assert processors != 132 or {tile for cut in cuts for tile, _ in cut} == {*tiles.MAXIMA_AND_SUMS}


@case(gpu_only=True, routes=("described",))
def gradients_of_shared_tiles_with_few_hidden_units() -> None:
    """In which a tile of exponentials has the fewest steps that shared ones have."""
    everything = {"bias": True, "class_weight": True, "class_sum": True}
    with tiles_with_less_l2():
        for rows, hidden, vocab, options in (
            (65, 1280, 144, {}),
            (2500, 1296, 5003, {"scale": -0.7, "idle": 0.3, **everything}),
            (2500, 1536, 4992, {"transform": "tanh mul:4.0 masked:-inf", "bias": True}),
            (3000, 1792, 5003, {}),
        ):
            p = problem(rows, hidden, vocab, torch.bfloat16, **options)
            p.x[5] *= 30  # the offset of this row is bad
            check_gradients(p)


@case(gpu_only=True, routes=("described",))
def gradients_of_many_hidden_units() -> None:
    """Those of large tiles, with more tiles of exponentials and of d_weight than programs."""
    everything = {"bias": True, "class_weight": True, "class_sum": True}
    for dtype, rows, hidden, vocab, transposed, options in (
        (torch.bfloat16, 65, 2048, 144, False, {}),
        (torch.bfloat16, 2500, 2064, 5003, False, {"scale": -0.7, "idle": 0.3, **everything}),
        (torch.bfloat16, 2500, 2064, 4992, True, {}),
        # d_input in whole tiles and in parts, the last of them short; and in two groups of row blocks.
        (torch.bfloat16, 2176, 2048, 5003, False, {}),
        (torch.bfloat16, 3000, 2048, 5003, False, {}),
        (torch.bfloat16, 700, 2048, 5003, False, {"transform": "tanh mul:4.0", "scale": 0.5, **everything}),
        (torch.bfloat16, 300, 4096, 16400, True, {"transform": "tanh mul:4.0 masked:-inf", "bias": True}),
        (torch.float16, 700, 2064, 5003, False, {"scale": -1.5, "idle": 0.6}),
    ):
        p = problem(rows, hidden, vocab, dtype, **options)
        if transposed:
            p.w = p.w.t().contiguous().t()
            assert gpu.GpuOperands.of(*p.operands, "").is_described()
        p.x[5] *= 30  # the offset of this row is bad
        check_gradients(p)
    p = problem(1500, 2048, 5003, torch.bfloat16)
    p.x *= 30  # those of most rows are
    check_gradients(p)
    p = problem(300, 2048, 5003, torch.bfloat16)
    p.x[3] = float("nan")
    d_input = cuda.linear_loss(*p.operands, *p.coefficients, True, True, False)[1]
    assert d_input[3].isnan().all() and d_input[4:].isfinite().all()


@case(gpu_only=True, routes=("described",))
def programs_that_wait_for_each_other_in_vain() -> None:
    """Get the same results, and get them: here as many are missing at every meeting as never come."""
    from fxfuse.kernels.hopper.launch.operands import Described

    p = problem(2176, 2048, 5003, torch.bfloat16)  # with tiles of every kernel that meets, whole and in parts
    operands, needs = (*p.operands, *p.coefficients), (True, True, False)
    want = [*cuda.linear_loss(*operands, *needs), *cuda.linear_loss(*operands, False, False, False)]
    counters = Described._counters
    missing = torch.full((4,), -(2**30), dtype=torch.int32, device=DEVICE)
    Described._counters = property(lambda self: itertools.repeat(missing))  # type: ignore[assignment]
    try:
        got = [*cuda.linear_loss(*operands, *needs), *cuda.linear_loss(*operands, False, False, False)]
    finally:
        Described._counters = counters  # type: ignore[method-assign]
    assert all(map(torch.equal, got, want))
    assert -(2**30) < int(missing[0]) < 0 or not tiles.takes_turns("stats", p.x)


@case(gpu_only=True, routes=("described",))
def programs_meet_as_often_as_they_are_waited_for() -> None:
    """The counters end at two steps a meeting; that more were waited for would be seen in the time alone."""
    from fxfuse.kernels.hopper.launch.operands import Described
    from fxfuse.kernels.hopper.products import LEAST_STEPS, MOST_PIECES

    vocab = 5003
    counters = Described._counters

    def used(rows: int, hidden: int) -> list[int]:
        p = problem(rows, hidden, vocab, torch.bfloat16)
        counted = torch.zeros(100, 4, dtype=torch.int32, device=DEVICE)
        given = iter(counted)
        Described._counters = property(lambda self: given)  # type: ignore[assignment]
        try:
            cuda.linear_loss(*p.operands, *p.coefficients, True, True, False)
        finally:
            Described._counters = counters  # type: ignore[method-assign]
        return [count for count in counted[:, 0].tolist() if count]

    def meetings(steps: int) -> int:
        return tiles.cdiv(steps, 2)

    if not tiles.takes_turns("stats", torch.empty(100, 2048, dtype=torch.bfloat16, device=DEVICE)):
        return
    rows, hidden = 2176, 2048
    processors, blocks, columns, steps = tiles.machine(DEVICE).processors, rows // 128, hidden // 256, -(-vocab // 64)
    exponentials = blocks * tiles.cdiv(vocab, 256) * meetings(hidden // 64)
    d_weight = tiles.cdiv(vocab, 128) * columns * meetings(rows // 64)
    # Whole tiles, and parts of those that are left, of which the last is given as many steps as a part must have.
    whole, rest = divmod(blocks * columns, processors)
    each = max(tiles.cdiv(steps, min(processors // max(rest, 1), MOST_PIECES.value)), LEAST_STEPS.value)
    parts = [max(min(each, steps - at), LEAST_STEPS.value) for at in range(0, steps, each)]
    d_input = whole * processors * meetings(steps) + rest * sum(map(meetings, parts))
    # No row's offset is bad, so the statistics of such rows have none.
    assert used(rows, hidden) == [exponentials, d_input, d_weight]
    # Of few hidden units only d_weight's do, here on tiles of 256x128.
    rows, hidden = 1200, 896
    assert used(rows, hidden) == [tiles.cdiv(vocab, 256) * tiles.cdiv(hidden, 128) * meetings(tiles.cdiv(rows, 64))]


@case(routes=("described",))
def the_kernels_of_the_benchmark_make_a_loss() -> None:
    """``bench/kernels.py`` calls them one by one, as ``hopper`` does for one chunk."""
    dtype = torch.bfloat16 if HAS_GPU else torch.float32
    if not tiles.has_descriptors(torch.empty(0, 16, dtype=dtype, device=DEVICE)):
        return  # an older GPU has none
    sys.path.append(str(pathlib.Path(__file__).parents[1] / "bench"))
    from kernels import Kernels

    made = Kernels((120, 256, 1000) if HAS_GPU else (12, 16, 40), str(DEVICE), dtype)
    chunks = made.chunks()
    assert [(rows.start, rows.stop) for rows in chunks] == [(0, made.call.rows)]
    made.statistics()
    made.exponentials()
    made.input_product()
    made.weight_product()
    x, w, c = made.call.input.double(), made.call.weight.double(), made.up.lse[:, None].double()
    z = x @ w.t()
    assert error(made.stats.lse, z.logsumexp(1)) <= STATS_BOUND
    dz = c * z.softmax(1)
    dz.scatter_add_(1, made.call.index, -c)
    assert error(made.d_input.out, dz @ w) <= 0.01 and error(made.d_weight.out, dz.t() @ x) <= 0.01


@case(routes=("general",))
def every_tile_is_visited_once_in_even_groups() -> None:
    from order import order_kernel

    for row_blocks, columns, most in ((1, 2, 8), (8, 3, 8), (9, 3, 8), (43, 5, 8), (43, 5, 16), (17, 2, 1), (3, 7, 2)):
        visited = torch.full((row_blocks * columns, 2), -1, dtype=torch.int32, device=DEVICE)
        order_kernel[(len(visited),)](visited, row_blocks, columns, GROUP=most)
        assert sorted(visited.tolist()) == [[r, c] for r in range(row_blocks) for c in range(columns)]
        # Each group begins with its row blocks at the first column.
        runs = itertools.groupby(visited.tolist(), key=lambda tile: tile[1])
        sizes = [len(list(tiles)) for column, tiles in runs if column == 0]
        assert max(sizes) <= most and max(sizes) - min(sizes) <= 1, sizes
        assert len(sizes) == -(-row_blocks // most)


@case(routes=("general",))
def rows_are_cut_evenly_into_chunks() -> None:
    from order import chunks_kernel

    for count, most in ((0, 32), (1, 32), (16, 16), (95, 32), (97, 32), (113, 48), (160, 48), (161, 176)):
        programs = count + 2
        bounds = torch.full((programs, 2), -1, dtype=torch.int32, device=DEVICE)
        chunks = torch.full((programs,), -1, dtype=torch.int32, device=DEVICE)
        chunks_kernel[(programs,)](bounds, chunks, count, most, BLOCK=16)
        needed = max(1, -(-count // most))
        starts, sizes = bounds.t().tolist()
        assert starts[0] == 0 and sum(sizes[:needed]) == count and not any(sizes[needed:])
        assert all(starts[i + 1] == starts[i] + sizes[i] for i in range(needed - 1))
        assert not any(start % 16 for start in starts[:needed])
        blocks = [-(-size // 16) for size in sizes[:needed]]
        assert max(sizes) <= most and max(blocks) - min(blocks) <= 1
        of_rows = [chunk for chunk in range(needed) for _ in range(sizes[chunk])]
        assert chunks.tolist()[:count] == of_rows


@case()
def foreign_indices_touch_nothing() -> None:
    p = problem(37, 24, 131, torch.float32, indexed=2)
    want = cuda.linear_stats(*p.operands, False, False)
    foreign = p.index.clone()
    foreign[::3, 1] = torch.tensor([131, 2**31 + 5, -(2**40)]).repeat(5)[: len(foreign[::3])].to(foreign)
    strange = dataclasses.replace(p, index=foreign)
    got = cuda.linear_stats(*strange.operands, False, False)
    legal = foreign == p.index
    assert torch.equal(got[0], want[0])
    for g, r in zip(got[1:3], want[1:3], strict=True):
        assert torch.equal(g, torch.where(legal, r, 0.0))
    gradients = cuda.linear_stats_backward(*strange.operands, want[0], want[5], *p.upstream, True, True, False)
    assert all(g.isfinite().all() for g in gradients)


@case(each_dtype=True)
def a_certain_class_keeps_its_log_probability(dtype: torch.dtype) -> None:
    p = problem(16, 24, 64, dtype)
    p.w.mul_(0.01)
    p.x.abs_()
    p.w[7] = 8.0 / float(p.x.float().sum(1).mean())
    p.index[:] = 7
    log_prob = cuda.linear_stats(*p.operands, False, False)[2]
    want = reference.linear_stats(*p.double().operands, False, False)[2]
    assert float((log_prob.double() - want).abs().max()) < 1e-6 and log_prob.max() <= 0


# --- range, repetition, memory --------------------------------------------------------------------------------


@case(each_dtype=True)
def upstream_of_any_size(dtype: torch.dtype) -> None:
    for size in (1e-8, 1e5):
        p = problem(40, 24, 90, dtype, bias=True, class_sum=True, size=size)
        _, *got = cuda.linear_loss(*p.operands, *p.coefficients, True, True, True)
        _, *want = reference.linear_loss(*p.double().operands, *p.double().coefficients, True, True, True)
        roundoff = torch.finfo(dtype).eps + 2e-6
        assert all(error(g, r) <= roundoff for g, r in zip(got, want, strict=True))
    p.g_class_sum[4] = float("nan")  # the bound by which float16 is normalised
    d_input = cuda.linear_loss(*p.operands, *p.coefficients, True, False, False)[1]
    assert d_input[4].isnan().all() and d_input[5].isfinite().all()


@case(each_dtype=True)
def the_same_bits_every_time(dtype: torch.dtype) -> None:
    size = (1000, 512, 50257) if HAS_GPU else (37, 24, 131)
    p = problem(*size, dtype, bias=True, class_sum=True, indexed=2, entropy=True)

    def run() -> list[Tensor]:
        stats = [*cuda.linear_stats(*p.operands, True, False), *cuda.linear_stats(*p.operands, True, False, **BOTH)]
        entropies = {"entropy": stats[-3], "g_entropy": p.g_entropy}
        arguments = *p.operands, stats[10], stats[15], *p.upstream, True, True, True
        stats += cuda.linear_stats_backward(*arguments, **entropies)
        return [*stats, *cuda.linear_loss(*p.operands, *p.coefficients, True, True, True)]

    first = run()
    for _ in range(9 if HAS_GPU else 1):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


@case(gpu_only=True, each_dtype=True, routes=("described", "general"))
def no_logits_in_memory(dtype: torch.dtype) -> None:
    rows, hidden, vocab = 8192, 256, 128_256
    logits = rows * vocab * 2
    p = problem(rows, hidden, vocab, dtype)

    def peak(run: Callable[[], object]) -> int:
        run()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    stored = general.ROWS_OF_STATS * tiles.padded(vocab) * 4 if dtype == torch.float32 else 0
    assert peak(lambda: cuda.linear_stats(*p.operands, False, False)) < stored + logits // 100
    gradients = (rows + vocab) * hidden * 4 * 2
    window = general.MOST_PRODUCT_BYTES if dtype == torch.float32 else max(windows.MOST_WINDOW_BYTES, logits // 7)
    most = window + gradients + (80 << 20)
    assert most < logits
    assert peak(lambda: cuda.linear_loss(*p.operands, *p.coefficients, True, True, False)) < most


@case(gpu_only=True, routes=("described", "general"))
def offsets_past_31_bits() -> None:
    rows, hidden, vocab = 17, fit(2047), 1_100_000
    assert vocab * hidden > 2**31
    p = problem(rows, 8, 64, torch.bfloat16)
    p.w = torch.randn(vocab, hidden, device=DEVICE, dtype=torch.bfloat16).mul_(0.05)
    p.x = torch.randn(rows, hidden, device=DEVICE, dtype=torch.bfloat16)
    p.index = torch.randint(vocab - 1000, vocab, (rows, 1), device=DEVICE)
    lse, picked, _, _, _, residual, *_ = cuda.linear_stats(*p.operands, False, False)
    z = torch.cat([p.x.double() @ part.double().t() for part in p.w.split(65536)], 1)
    assert error(lse, z.logsumexp(1)) <= STATS_BOUND
    assert error(picked, z.gather(1, p.index)) <= STATS_BOUND
    d_input, d_weight, _ = cuda.linear_stats_backward(
        *p.operands, lse, residual, p.g_lse, p.g_picked, None, True, True, False
    )
    dz = p.g_lse.double()[:, None] * z.softmax(1)
    dz.scatter_add_(1, p.index, p.g_picked.double())
    want = sum(dz[:, i : i + 65536] @ p.w[i : i + 65536].double() for i in range(0, vocab, 65536))
    assert error(d_input, want) <= 1e-2
    assert error(d_weight[-4096:], dz[:, -4096:].t() @ p.x.double()) <= 1e-2


@case(gpu_only=True)
def a_million_classes() -> None:
    check_gradients(problem(200, 64, 1_000_003, torch.bfloat16, bias=True))


@case(gpu_only=True, each_dtype=True, routes=("described", "general"))
def capture_in_a_cuda_graph(dtype: torch.dtype) -> None:
    p = problem(500, 256, 5003, dtype, bias=True, class_sum=True, idle=0.5)

    def run() -> list[Tensor]:
        stats = cuda.linear_stats(*p.operands, True, True)
        return [*stats, *cuda.linear_loss(*p.operands, *p.coefficients, True, True, True)]

    for _ in range(3):  # the last one from a tape, as in the graph
        want = run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


@case(routes=("described",))
def lists_of_rows() -> None:
    rows = 5000  # several programs, the last of which counts more rows at once than it lists
    for idle in (0.0, 0.4, 1.1):
        p = problem(rows, 16, 16, torch.float16, indexed=2, class_sum=True, idle=idle)
        call = gpu.GpuOperands.of(*p.operands, "").call()
        work = (p.g_picked != 0).any(1) | (p.g_class_sum != 0)
        assert (idle == 0) == bool(work.all()) and (idle > 1) == (not work.any())
        listed, made = call.listed_by_coefficients(Coefficients(*p.coefficients))
        known = torch.where(p.index >= 0, p.g_picked, 0.0)
        assert torch.equal(made.picked, known)
        assert torch.allclose(made.lse, -known.sum(1) - p.g_class_sum * len(p.w), atol=1e-5)
        for order, length in (
            listed,
            call.listed(gpu.GpuUpstream(*p.upstream)),
            call.listed_by_flags(work.view(torch.int8)),
        ):
            want = work.nonzero()[:, 0]
            assert int(length) == len(want)
            assert torch.equal(order, F.pad(want, (0, rows - len(want))).int())
        (order, length), made = call.listed_by_coefficients(Coefficients(p.g_picked, None))
        want = ((known.sum(1) != 0) | (known != 0).any(1)).nonzero()[:, 0]
        assert torch.equal(order[: int(length)], want.int()) and torch.allclose(made.lse, -known.sum(1), atol=1e-6)


@case(routes=("described",))
def classes_of_rows() -> None:
    rows, vocab = 700, 90
    p = problem(rows, 16, vocab, torch.float16, idle=0.3)
    call = gpu.GpuOperands.of(*p.operands, "").call()
    length = int(call.listed_by_coefficients(Coefficients(*p.coefficients))[0].length)
    assert 2 * 128 < length < rows
    for most_ranked in (0, 8192):  # a sort of the library; one row with all others
        with mock.patch("fxfuse.kernels.hopper.launch.classes.MOST_RANKED", most_ranked):
            cut = call.cut(call.listed_by_coefficients(Coefficients(*p.coefficients))[0], 256)
            found = call.classes(cut)
        chunks, blocks = -(-length // cut.most), -(-length // call.row_block)
        assert chunks > 1
        # As ``rows_are_cut_evenly_into_chunks``, the larger ones first.
        starts = [
            (chunk * (blocks // chunks) + min(chunk, blocks % chunks)) * call.row_block for chunk in range(chunks)
        ]
        for chunk, (start, stop) in enumerate(itertools.pairwise([*starts, length])):
            listed = cut.order[start:stop]
            label = torch.where(p.index[listed, 0] >= 0, p.index[listed, 0], vocab)
            keys, position = (chunk * (vocab + 1) + label).sort(stable=True)
            at = slice(start, stop)
            assert torch.equal(found.keys[at], keys.to(found.keys.dtype))
            assert torch.equal(found.sources[at], listed[position])
            if chunk == 0:
                slots = torch.full_like(found.slots, -1)
                for slot in reversed(range(len(keys))):
                    if keys[slot] < vocab:
                        slots[keys[slot]] = slot
                assert torch.equal(found.slots, slots)


@case()
def clean_indices() -> None:
    from fxfuse.kernels.index import clean

    for ignore_index in (None, -100, 3, 2**40):
        index = torch.randint(7, (1500, 2), device=DEVICE)
        ignored = torch.rand(index.shape, device=DEVICE) < 0.3
        if ignore_index is not None:
            index = torch.where(ignored, ignore_index, index)
        want = index if ignore_index is None else torch.where(index == ignore_index, -1, index)
        assert torch.equal(clean(index, 7, ignore_index), want)  # test_errors has those that are no classes


@case(routes=("general",))
def blocks_of_the_largest_sizes_of_32_bits() -> None:
    """One block is there, and so many programs are said to be that none has another."""
    from fxfuse.kernels.scale import BLOCK, scale_kernel

    values, by = torch.ones(BLOCK, device=DEVICE), torch.tensor(3.0, device=DEVICE)
    for size in (2**31 - 2 * BLOCK, 2**31 - 1):
        out = torch.zeros_like(values)
        scale_kernel[(1,)](values, by, out, size, 2**31 - 1, IN_PLACE=False, BLOCK=BLOCK)
        assert bool((out == 3.0).all())


@case(each_dtype=True, routes=("general",))
def scaled_gradients(dtype: torch.dtype) -> None:
    from fxfuse.kernels import recorder, scale, tape

    for size in (0, 1, 4097, 1 << 22):  # the last goes around more than once
        with mock.patch.object(recorder, "_tapes", {}), mock.patch.object(recorder, "ATTEMPTS", 3):
            for factor in (1 / 3, 1.0, 0.0, float("inf"), float("nan")):  # in steps, on a tape, from the tape
                values = torch.randn(size, device=DEVICE).to(dtype)
                by = torch.tensor(factor, device=DEVICE)
                expected = (values.float() * by).to(dtype)
                out, own = scale.scaled(values, by), values.clone()
                scale.scale_(own, by)
                for each in (out, own):
                    assert torch.equal(each.nan_to_num(), expected.nan_to_num()), (size, factor)
                    assert torch.equal(each.isnan(), expected.isnan()), (size, factor)
            assert [type(made) for made in recorder._tapes.values()] == [tape.Tape] * 2


# --- pytest's side, and the interpreting process's ------------------------------------------------------------


interpreted, test_kernels = made_of(CASES, __file__)


def test_importing_the_ops_imports_neither_triton_nor_a_gpu() -> None:
    # torch itself may import Triton; what counts is that fxfuse does not need it.
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, fxfuse.ops.cuda, fxfuse.kernels.tiles\n"
        "assert not torch.cuda.is_initialized()"
    )
    root = pathlib.Path(__file__).resolve().parents[1]
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, timeout=120)


if __name__ == "__main__":
    CASES.main()
