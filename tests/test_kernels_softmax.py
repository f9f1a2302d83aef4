"""``fxfuse.ops.softmax_cuda`` and ``divergence_cuda`` against eager: on a GPU, or under Triton's interpreter."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from helpers import FLOORS, LargestTensor, assert_no_worse_than_eager, doubled, relative_error, upstream
from interpreted import DEVICE, DTYPES, HAS_GPU, Cases, made_of
from torch import Tensor

from fxfuse.ops import divergence, divergence_cuda, softmax_cuda, windows
from fxfuse.transform import apply, decode

inf, nan = float("inf"), float("nan")
case = Cases()
SOFTCAP = "tanh mul:3.0"
MIXTURES = (0.0, 0.3)  # shares of the teacher


def sizes(on_gpu: tuple[int, ...], interpreted: tuple[int, ...]) -> tuple[int, ...]:
    return on_gpu if HAS_GPU else interpreted


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(DEVICE)


def head(
    rows: int, hidden: int, vocab: int, dtype: torch.dtype, *, bias: bool = True, seed: int = 0
) -> tuple[Tensor, ...]:
    """Input and weight for logits of unit scale, and a bias or None."""
    x, w, b = normal(rows, hidden, seed=seed), normal(vocab, hidden, seed=seed + 1), normal(vocab, seed=seed + 2)
    return x.to(dtype), (w / hidden**0.5).to(dtype), b.to(dtype) if bias else None  # type: ignore[return-value]


def together(results: Iterable[list[Tensor]]) -> list[Tensor]:
    """What several problems returned, each tensor with its like: of a few numbers alone, errors are luck."""
    return [torch.cat([one.flatten() for one in alike]) for alike in zip(*results, strict=True)]


def logits(x: Tensor, w: Tensor, b: Tensor | None, scale: float, transform: str) -> Tensor:
    return apply(decode(transform), F.linear(x, w, b) * scale)


def leaves(*operands: Tensor | None) -> list[Tensor | None]:
    return [t if t is None else t.detach().requires_grad_() for t in operands]


def gradients(outs: list[Tensor], operands: list[Tensor | None], g: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(outs, [t for t in operands if t is not None], g))


# --- softmax --------------------------------------------------------------------------------------------------


def softmax_and_gradients(
    operands: tuple[Any, ...], scale: float, log: bool, dtype: torch.dtype, transform: str, g: Tensor, memory: int = 0
) -> list[Tensor]:
    out = softmax_cuda.linear_softmax(*operands, scale, log, dtype, transform=transform)
    grads = softmax_cuda.linear_softmax_backward(
        *operands, scale, log, out, g, True, True, operands[2] is not None, transform=transform, memory=memory
    )
    return [out, *(grad for grad, t in zip(grads, operands, strict=True) if t is not None)]


def eager_softmax(
    operands: tuple[Any, ...], scale: float, log: bool, dtype: torch.dtype, transform: str, g: Tensor
) -> list[Tensor]:
    given = leaves(*operands)
    z = logits(*given, scale, transform)
    out = z.log_softmax(1, dtype=dtype) if log else z.softmax(1, dtype=dtype)
    return [out.detach(), *gradients([out], given, [g.to(dtype)])]


def check_softmax(
    *problems: tuple[Any, ...],
    scale: float = 0.7,
    transforms: tuple[str, ...] = ("", SOFTCAP),
    results: tuple[torch.dtype, ...] = (),
    g: Tensor | None = None,
    floor: float = 0.0,
    memory: int = 0,
) -> None:
    x, w, _ = problems[0]
    dtype = x.dtype
    for result in results or {torch.float32, dtype}:
        for transform in transforms:
            for log in (False, True):
                shape = x.new_empty((x.shape[0], w.shape[0]), dtype=result)
                up = upstream(shape) if g is None else g.to(result)
                how = scale, log, result, transform, up
                in_double = scale, log, torch.float64, transform, up
                exact = together(eager_softmax(doubled(*operands), *in_double) for operands in problems)
                actual = together(softmax_and_gradients(operands, *how, memory) for operands in problems)
                eager = together(eager_softmax(operands, *how) for operands in problems)
                at_least = max(floor, FLOORS[result], 2e-6)
                assert_no_worse_than_eager(actual[:1], eager[:1], exact[:1], at_least)
                assert_no_worse_than_eager(actual[1:], eager[1:], exact[1:], max(at_least, FLOORS[dtype]))


@case(each_dtype=True)
def softmax_of_odd_sizes(dtype: torch.dtype) -> None:
    shape = sizes((333, 771, 50257), (37, 21, 131))
    check_softmax(head(*shape, dtype), results=DTYPES)
    check_softmax(head(*shape, dtype, bias=False), scale=-1.5, results=(dtype,))


@case(each_dtype=True)
def softmax_of_even_sizes(dtype: torch.dtype) -> None:
    check_softmax(head(*sizes((512, 512, 8192), (32, 32, 128)), dtype))


@case(each_dtype=True)
def softmax_of_own_products(dtype: torch.dtype) -> None:
    with own_products():
        check_softmax(head(*sizes((333, 512, 8192), (37, 32, 128)), dtype))
        check_softmax(head(*sizes((200, 4096, 5016), (37, 32, 136)), dtype), scale=-1.5, results=(dtype,))
        x, w, b = head(*sizes((300, 64, 1032), (20, 32, 72)), dtype)
        check_softmax((x, w.t().contiguous().t(), None), results=(dtype,))
        for first in (-inf, inf, nan):
            b[:8] = first
            for log in (False, True):
                out = softmax_cuda.linear_softmax(x, w, b, 1.0, log, dtype)
                want = F.linear(x, w, b).log_softmax(1) if log else F.linear(x, w, b).softmax(1)
                torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-3, equal_nan=True)


@contextlib.contextmanager
def own_products() -> Iterator[None]:
    """However few entries, and a chunk for each block of rows."""
    from fxfuse.kernels import tiles
    from fxfuse.ops import hopper  # both import Triton

    kept = hopper.LEAST_STORED, tiles.STATS_BYTES
    try:
        hopper.LEAST_STORED = tiles.STATS_BYTES = 0
        yield
    finally:
        hopper.LEAST_STORED, tiles.STATS_BYTES = kept


@case(each_dtype=True)
def softmax_of_one_long_row(dtype: torch.dtype) -> None:
    check_softmax(head(*sizes((1, 64, 1_000_003), (1, 24, 1003)), dtype), floor=1e-5)


@case(each_dtype=True)
def softmax_of_tiny_sizes(dtype: torch.dtype) -> None:
    for shape in ((1, 1, 1), (2, 1, 3), (1, 5, 2), (17, 16, 33), (40, 48, 1)):
        # With one class every gradient is zero, so that the error is absolute.
        check_softmax(*(head(*shape, dtype, seed=seed) for seed in range(0, 160, 10)))


@case(each_dtype=True)
def softmax_of_no_rows(dtype: torch.dtype) -> None:
    check_softmax(head(0, 24, 90, dtype))


@case(each_dtype=True)
def softmax_of_any_layout(dtype: torch.dtype) -> None:
    rows, hidden, vocab = sizes((200, 136, 3008), (20, 24, 96))
    x, w, b = head(rows, hidden, vocab, dtype)
    g = normal(rows, vocab)
    plain = {"transforms": ("",), "results": (torch.float32,)}
    check_softmax((x, w.t().contiguous().t(), b), g=g.t().contiguous().t(), **plain)
    sliced = torch.stack((x, x + 1), 2)[:, :, 0], torch.cat((w, w), 1)[:, :hidden], torch.stack((b, b), 1)[:, 1]
    check_softmax(sliced, g=torch.stack((g, g), 2)[:, :, 1], **plain)
    moved = x[:1].expand(rows, hidden), w, torch.cat((b[:1], b))[1:]
    check_softmax(moved, g=normal(1, vocab).expand(rows, vocab), **plain)


@case(each_dtype=True)
def softmax_of_masked_classes(dtype: torch.dtype) -> None:
    vocab = 3000 if HAS_GPU else 131
    x, w, b = head(37, 24, vocab, dtype)
    b[: 2 * vocab // 3] = -inf  # whole tiles, the first among them
    b[-5:-2] = -inf
    g = normal(37, vocab)
    for log in (False, True):
        out, d_x, d_w, d_b = softmax_and_gradients((x, w, b), 1.0, log, torch.float32, "", g)
        exact = eager_softmax(doubled(x, w, b), 1.0, log, torch.float64, "", g)
        eager = eager_softmax((x, w, b), 1.0, log, torch.float32, "", g)
        assert_no_worse_than_eager([out, d_x, d_w, d_b], eager, exact, max(2e-6, FLOORS[dtype]))


@case(each_dtype=True)
def softmax_of_rows_that_are_not_finite(dtype: torch.dtype) -> None:
    x, w, b = head(37, 24, 131, dtype)
    x[3] = nan
    x[20] = inf
    x[21], x[21, 0] = 0, inf  # both infinities among its logits
    for log in (False, True):
        out = softmax_cuda.linear_softmax(x, w, b, 1.0, log, torch.float32)
        exact = F.linear(*doubled(x, w, b))
        exact = exact.log_softmax(1) if log else exact.softmax(1)
        torch.testing.assert_close(out.double(), exact, equal_nan=True, rtol=1e-5, atol=1e-6)
        assert bool(out[[3, 20, 21]].isnan().all()) and bool(out[4].isfinite().all())
    for row in ([-inf] * 3, [inf, 1.0, 2.0], [1.0, nan, 2.0], [-inf, 1.0, 2.0]):
        b = torch.tensor(row, dtype=dtype, device=DEVICE)
        out = softmax_cuda.linear_softmax(x.new_zeros(2, 1), x.new_zeros(3, 1), b, 1.0, True, torch.float32)
        want = b.float().log_softmax(0).expand(2, 3)
        torch.testing.assert_close(out, want, equal_nan=True)


@case(each_dtype=True)
def softmax_of_huge_logits(dtype: torch.dtype) -> None:
    z = torch.tensor([[8192.0, 8200.0, 8184.0, -8192.0], [-8192.0, -8200.0, -8192.0, -8208.0]]).repeat(8, 20).to(DEVICE)
    eye = torch.eye(16, device=DEVICE, dtype=dtype)
    # Gradients of the hidden states are sums of 8192 times numbers that add up to zero: some roundings are luck.
    check_softmax(
        (eye, z.t().contiguous().to(dtype), None), scale=1.0, transforms=("",), g=normal(16, 80) / 64, floor=6e-3
    )
    out = softmax_cuda.linear_softmax(eye, z.t().to(dtype), None, 1.0, True, torch.float32)
    assert relative_error(out, z.to(dtype).double().log_softmax(1)) < 1e-6


@case(each_dtype=True)
def probabilities_of_16_bits_do_not_exceed_one(dtype: torch.dtype) -> None:
    """They are those of the logits as they were stored."""
    x, w, b = head(40, 32, 70, dtype)
    for result in DTYPES:
        for scale in (1.0, 40.0):
            log_p = softmax_cuda.linear_softmax(x, w, b, scale, True, result)
            p = softmax_cuda.linear_softmax(x, w, b, scale, False, result)
            assert float(log_p.max()) <= 0 and float(p.max()) <= 1
            assert float((p.float().sum(1) - 1).abs().max()) < 4 * torch.finfo(result).eps


@case(each_dtype=True)
def softmax_in_several_windows(dtype: torch.dtype) -> None:
    for rows, vocab in ((20, 150), (150, 20)):
        with small_windows(32 * 20 * 4):
            check_softmax(head(rows, 24, vocab, dtype), transforms=(SOFTCAP,), results=(torch.float32,))
        with small_windows(1 << 30):
            check_softmax(head(rows, 24, vocab, dtype), transforms=("",), results=(torch.float32,), memory=1)


@contextlib.contextmanager
def small_windows(most: int) -> Iterator[None]:
    names = ("LEAST_WINDOW_BYTES", "MOST_WINDOW_BYTES", "LEAST_WINDOW")
    kept = [getattr(windows, name) for name in names]
    rows = windows.CHUNK_ROWS
    try:
        for name, value in zip(names, (0, most, 32), strict=True):
            setattr(windows, name, value)
        windows.CHUNK_ROWS = 4
        yield
    finally:
        windows.CHUNK_ROWS = rows
        for name, value in zip(names, kept, strict=True):
            setattr(windows, name, value)


@case(each_dtype=True)
def softmax_gradients_of_any_size(dtype: torch.dtype) -> None:
    """float16 cannot hold the gradients of the logits: they are made 2**22 times smaller or larger than usual."""
    x, w, b = head(40, 24, 90, dtype)
    b = b.float()
    g = normal(40, 90)
    for log in (False, True):
        out = softmax_cuda.linear_softmax(x, w, b, 1.0, log, torch.float32)
        args = (x, w, b, 1.0, log, out)
        plain = softmax_cuda.linear_softmax_backward(*args, g, False, False, True)[2]
        for factor in (2.0**-22, 2.0**22):
            d_bias = softmax_cuda.linear_softmax_backward(*args, g * factor, False, False, True)[2]
            torch.testing.assert_close(d_bias / factor, plain, rtol=1e-6, atol=1e-6)


@case(each_dtype=True)
def softmax_gradients_that_are_not_needed(dtype: torch.dtype) -> None:
    x, w, b = head(20, 24, 90, dtype)
    for transform in ("", SOFTCAP):
        out = softmax_cuda.linear_softmax(x, w, b, 1.0, True, torch.float32, transform=transform)
        args = (x, w, b, 1.0, True, out, upstream(out))
        full = softmax_cuda.linear_softmax_backward(*args, True, True, True, transform=transform)
        for wanted in range(3):
            some = softmax_cuda.linear_softmax_backward(*args, *(i == wanted for i in range(3)), transform=transform)
            for i, (have, all_of_it) in enumerate(zip(some, full, strict=True)):
                assert torch.equal(have, all_of_it if i == wanted else all_of_it.new_zeros((0,)))


@case(each_dtype=True)
def softmax_has_the_same_bits_every_time(dtype: torch.dtype) -> None:
    operands = head(*sizes((500, 256, 5003), (20, 24, 90)), dtype)
    g = normal(operands[0].shape[0], operands[1].shape[0])
    for log in (False, True):
        runs = [softmax_and_gradients(operands, 0.5, log, torch.float32, SOFTCAP, g) for _ in range(3)]
        assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))


@case(gpu_only=True, each_dtype=True)
def softmax_gradients_take_little_memory(dtype: torch.dtype) -> None:
    operands = head(4096, 64, 131071, dtype)
    out = softmax_cuda.linear_softmax(*operands, 1.0, True, dtype)
    g = torch.ones((), dtype=dtype, device=DEVICE).expand(out.shape)
    for transform in ("", SOFTCAP):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        grads = softmax_cuda.linear_softmax_backward(
            *operands, 1.0, True, out, g, True, True, True, transform=transform
        )
        torch.cuda.synchronize()
        extra = torch.cuda.max_memory_allocated() - before - 3 * sum(one.nbytes for one in grads)
        assert extra < out.nbytes / 2, f"{extra >> 20} MiB beside {out.nbytes >> 20} MiB"


@case(gpu_only=True, each_dtype=True)
def softmax_in_a_cuda_graph_and_without_waiting(dtype: torch.dtype) -> None:
    operands = head(500, 256, 5003, dtype)
    g = normal(500, 5003)

    def run() -> list[Tensor]:
        return softmax_and_gradients(operands, 0.5, True, torch.float32, SOFTCAP, g)

    check_capture(run)


def check_capture(run: Any) -> None:
    want = run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


@case(gpu_only=True)
def softmax_past_31_bits() -> None:
    for vocab in (1_000_003, 1_000_000):  # products by cuBLAS, and our own
        _past_31_bits(2200, 64, vocab)


def _past_31_bits(rows: int, hidden: int, vocab: int) -> None:
    x, w, b = head(rows, hidden, vocab, torch.bfloat16)
    out = softmax_cuda.linear_softmax(x, w, b, 1.0, True, torch.bfloat16)
    assert out.numel() > 2**31
    exact = F.linear(*doubled(x[-3:], w, b)).log_softmax(1)
    assert relative_error(out[-3:], exact) < 2 * FLOORS[torch.bfloat16]
    g = torch.zeros_like(out)
    g[-3:] = normal(3, vocab)
    d_x, _, _ = softmax_cuda.linear_softmax_backward(x, w, b, 1.0, True, out, g, True, False, False)
    want = (g[-3:].double() - exact.exp() * g[-3:].double().sum(1, keepdim=True)) @ w.double()
    assert not d_x[:-3].any() and relative_error(d_x[-3:], want) < 4 * FLOORS[torch.bfloat16]


# --- divergence -----------------------------------------------------------------------------------------------


def two_heads(
    rows: int,
    hidden: int,
    vocab: int,
    dtype: torch.dtype,
    *,
    bias: bool = True,
    teacher_dtype: Any = None,
    seed: int = 0,
) -> tuple[Any, ...]:
    """A student and a teacher with other and more hidden units."""
    x, w, b = head(rows, hidden, vocab, dtype, bias=bias, seed=seed)
    y, v, c = head(rows, 2 * hidden + 3, vocab, teacher_dtype or dtype, bias=bias, seed=seed)
    return x, w, b, 0.7, y, v, c, -1.3


def divergence_and_gradients(args: tuple[Any, ...], g: list[Tensor], memory: int = 0, **options: Any) -> list[Tensor]:
    """For the first two of ``g``, or with a share for all three."""
    options["memory"], share = memory, options.get("share", 0.0)
    out = divergence_cuda.linear_divergence(*args, **options)
    needs = [t is not None for t in (*args[:3], *args[4:7])]
    g_student_kl = g[2] if share else None
    grads = divergence_cuda.linear_divergence_backward(
        *args, *out, *g[:2], *needs, g_student_kl=g_student_kl, **options
    )
    return [*out[: 3 if share else 2], *(grad for grad, need in zip(grads, needs, strict=True) if need)]


def eager_divergence(
    args: tuple[Any, ...], g: list[Tensor], transform: str = "", teacher_transform: str = "", share: float = 0.0
) -> list[Tensor]:
    given = leaves(*args[:3]), leaves(*args[4:7])
    acc = torch.float64 if args[0].dtype == torch.float64 else torch.float32
    log_q = logits(*given[0], args[3], transform).to(acc).log_softmax(1)
    log_p = logits(*given[1], args[7], teacher_transform).to(acc).log_softmax(1)
    log_m = log_q
    if share:
        log_m = torch.logsumexp(torch.stack([log_q + math.log1p(-share), log_p + math.log(share)]), 0)
    kl, student_kl = (F.kl_div(log_m, t, reduction="none", log_target=True).sum(1) for t in (log_p, log_q))
    out = [kl, -(log_p.exp() * log_m).sum(1), *([student_kl] if share else [])]
    grads = gradients(out, [*given[0], *given[1]], [one.to(acc) for one in g[: len(out)]])
    return [*(one.detach() for one in out), *grads]


def check_divergence(
    *problems: tuple[Any, ...],
    floor: float = 0.0,
    memory: int = 0,
    softcaps: tuple[bool, ...] = (False, True),
    shares: tuple[float, ...] = (0.0,),
) -> None:
    rows = problems[0][0].shape[0]
    # A float32 vector for each of the three, of both signs.
    g = [normal(rows, seed=3), normal(rows, seed=4) + 0.5, normal(rows, seed=5) - 0.5]
    for softcap, share in itertools.product(softcaps, shares):
        options = {"transform": SOFTCAP, "teacher_transform": "tanh mul:2.0"} if softcap else {}
        options["share"] = share
        exact = together(eager_divergence(doubled(*args), g, **options) for args in problems)
        actual = together(divergence_and_gradients(args, g, memory, **options) for args in problems)
        eager = together(eager_divergence(args, g, **options) for args in problems)
        for a, e, x in zip(actual, eager, exact, strict=True):
            assert_no_worse_than_eager([a], [e], [x], max(floor, 2e-6, FLOORS[a.dtype]))


@case(each_dtype=True)
def divergence_of_odd_sizes(dtype: torch.dtype) -> None:
    shape = sizes((333, 771, 50257), (37, 21, 131))
    check_divergence(two_heads(*shape, dtype), shares=MIXTURES)
    check_divergence(two_heads(*shape, dtype, bias=False), shares=MIXTURES)


@case(each_dtype=True)
def divergence_of_even_sizes(dtype: torch.dtype) -> None:
    check_divergence(two_heads(*sizes((512, 512, 8192), (32, 32, 128)), dtype), shares=MIXTURES)


@case()
def divergence_of_different_dtypes() -> None:
    for dtype in DTYPES:
        for teacher_dtype in DTYPES:
            check_divergence(
                two_heads(21, 16, 70, dtype, teacher_dtype=teacher_dtype), softcaps=(True,), shares=MIXTURES
            )


@case(each_dtype=True)
def divergence_of_one_long_row(dtype: torch.dtype) -> None:
    check_divergence(two_heads(*sizes((1, 64, 1_000_003), (1, 24, 1003)), dtype), floor=1e-5)


@case(each_dtype=True)
def divergence_of_tiny_sizes(dtype: torch.dtype) -> None:
    for shape in ((2, 1, 3), (1, 5, 2), (17, 16, 33)):
        check_divergence(*(two_heads(*shape, dtype, seed=seed) for seed in range(0, 160, 10)))
    args = two_heads(40, 48, 1, dtype)
    out = divergence_and_gradients(args, [normal(40), normal(40)])
    assert all(float(t.abs().max()) < 1e-5 for t in out)


@case(each_dtype=True)
def divergence_of_no_rows(dtype: torch.dtype) -> None:
    check_divergence(two_heads(0, 24, 90, dtype))


@case(each_dtype=True)
def divergence_of_any_layout(dtype: torch.dtype) -> None:
    rows, hidden, vocab = sizes((200, 136, 3008), (20, 24, 96))
    x, w, b, scale, y, v, c, teacher_scale = two_heads(rows, hidden, vocab, dtype)
    transposed = w.t().contiguous().t(), b, scale, y, v.t().contiguous().t(), c, teacher_scale
    check_divergence((x, *transposed))
    sliced = torch.stack((x, x + 1), 2)[:, :, 0], torch.cat((w, w), 1)[:, :hidden], torch.stack((b, b), 1)[:, 1]
    # The rounding of the teacher's one log-sum-exp, up to 5e-7, is in every divergence, which are about 0.3.
    one_row = y[:1].expand(y.shape), v, torch.cat((c[:1], c))[1:], teacher_scale
    check_divergence((*sliced, scale, *one_row), floor=4e-6)


@case(each_dtype=True)
def a_student_close_to_its_teacher(dtype: torch.dtype) -> None:
    rows, hidden, vocab = sizes((512, 256, 8191), (40, 16, 70))
    for distance in (1e-1, 1e-3):
        problems = []
        for seed in range(0, 30, 10):
            x, w, b = head(rows, hidden, vocab, dtype, seed=seed)
            near = (w.float() + normal(vocab, hidden, seed=seed + 9) * distance / hidden**0.5).to(dtype)
            problems.append((x, near, b, 1.0, x.clone(), w, b.clone(), 1.0))
        check_divergence(*problems, softcaps=(False,), shares=MIXTURES)
    for share in MIXTURES:
        kl, _, student_kl, *_ = divergence_cuda.linear_divergence(x, w, b, 1.0, x, w, b, 1.0, share=share)
        assert not kl.any() and not student_kl.any()


@case(each_dtype=True)
def divergence_of_masked_classes(dtype: torch.dtype) -> None:
    vocab = 3000 if HAS_GPU else 131
    x, w, b, scale, y, v, c, _ = two_heads(37, 24, vocab, dtype)
    barred = torch.arange(vocab, device=DEVICE) < 2 * vocab // 3  # whole tiles, the first among them
    both = barred & (torch.arange(vocab, device=DEVICE) % 2 == 0)
    c[barred], b[both] = -inf, -inf
    g = [normal(37), normal(37)]
    kl, cross_entropy, *grads = divergence_and_gradients((x, w, b, scale, y, v, c, 1.0), g)
    given = leaves(*doubled(x, w, b)), leaves(*doubled(y, v, c))
    log_q = (F.linear(*given[0]) * scale)[:, ~both].log_softmax(1)[:, ~barred[~both]]
    log_p = F.linear(*given[1])[:, ~barred].log_softmax(1)
    want = [(log_p.exp() * (log_p - log_q)).sum(1), -(log_p.exp() * log_q).sum(1)]
    exact = gradients(want, [*given[0], *given[1]], [one.double() for one in g])
    for a, e in zip((kl, cross_entropy, *grads), (*want, *exact), strict=True):
        assert relative_error(a, e.detach()) < 2 * max(FLOORS[a.dtype], 1e-6)
    assert not grads[2][both].any() and not grads[5][barred].any()


@case(each_dtype=True)
def mixture_of_masked_classes(dtype: torch.dtype) -> None:
    """What one of the two rules out the other has all the same; what both rule out counts for nothing."""
    vocab = 3000 if HAS_GPU else 131
    x, w, b, scale, y, v, c, _ = two_heads(37, 24, vocab, dtype)
    at = torch.arange(vocab, device=DEVICE)
    b[at % 3 == 0], c[at < vocab // 2] = -inf, -inf
    args, g = (x, w, b, scale, y, v, c, 1.0), [normal(37, seed=seed) for seed in range(3)]
    actual = divergence_and_gradients(args, g, share=0.25)
    # In float64 these take the way of a CPU, which ``test_divergence`` holds to eager.
    exact = divergence_and_gradients(doubled(*args), [one.double() for one in g], share=0.25)
    for a, e in zip(actual, exact, strict=True):
        assert bool(a.isfinite().all())
        assert relative_error(a, e) < 2 * max(FLOORS[a.dtype], 1e-6)


@case(each_dtype=True)
def divergence_of_rows_that_are_not_finite(dtype: torch.dtype) -> None:
    x, w, b, scale, y, v, c, teacher_scale = two_heads(37, 24, 131, dtype)
    x[3], x[20], y[5] = nan, inf, -inf
    args = (x, w, b, scale, y, v, c, teacher_scale)
    bad = torch.tensor([3, 5, 20], device=DEVICE)
    good = torch.ones(37, dtype=torch.bool, device=DEVICE).index_fill(0, bad, False)
    # Rows without upstream gradients contribute exactly nothing, whatever they are.
    g = [normal(37, seed=seed).masked_fill(~good, 0) for seed in range(3)]
    clean = x[good], w, b, scale, y[good], v, c, teacher_scale
    for share in MIXTURES:
        count = 3 if share else 2
        out, grads = (found := divergence_and_gradients(args, g, share=share))[:count], found[count:]
        for t in out:
            assert bool(t[~good].isnan().all()) and bool(t[good].isfinite().all())
        without = divergence_and_gradients(clean, [one[good] for one in g], share=share)[count:]
        for i, (a, e) in enumerate(zip(grads, without, strict=True)):
            if i in (0, 3):
                assert not a[~good].any()
                a = a[good]
            assert relative_error(a, e.double()) < 4 * max(FLOORS[dtype], 1e-6)


@case(each_dtype=True)
def divergence_of_huge_logits(dtype: torch.dtype) -> None:
    student = torch.tensor([[8192.0, 8200.0, 8184.0, -8192.0], [-8192.0, -8200.0, -8192.0, -8208.0]]).repeat(8, 20)
    teacher = torch.tensor([[4096.0, 4096.0, 4092.0, -4096.0], [-8192.0, -8192.0, -8200.0, -8208.0]]).repeat(8, 20)
    eye = torch.eye(16, device=DEVICE, dtype=dtype)
    weights = [z.t().contiguous().to(DEVICE, dtype) for z in (student, teacher)]
    args = (eye, weights[0], None, 1.0, eye.clone(), weights[1], None, 1.0)
    g = [normal(16, seed=3) / 64, normal(16, seed=4) / 64]
    answers = [f(a, g) for f, a in ((divergence_and_gradients, args), (eager_divergence, args))]
    exact = eager_divergence(doubled(*args), g)
    # Gradients of the hidden states are sums of 8192 times numbers that add up to zero: some roundings are luck.
    assert_no_worse_than_eager(*answers, exact, 6e-3)
    assert_no_worse_than_eager(*(one[:2] for one in answers), exact[:2], 2e-6)


@case(each_dtype=True)
def divergence_in_several_chunks_and_windows(dtype: torch.dtype) -> None:
    for rows, vocab in ((20, 150), (150, 20)):
        with small_windows(32 * 20 * 8):
            assert len(windows.chunks_of(rows, 8 * vocab, windows.window_bytes(rows * 8 * vocab, 0))) > 2
            check_divergence(two_heads(rows, 24, vocab, dtype), softcaps=(True,), shares=MIXTURES)
        with small_windows(1 << 30):
            check_divergence(two_heads(rows, 24, vocab, dtype), softcaps=(False,), memory=1, shares=MIXTURES)


@case(each_dtype=True)
def divergence_gradients_of_any_size(dtype: torch.dtype) -> None:
    """float16 cannot hold the gradients of the logits: they are made 2**22 times smaller or larger than usual."""
    x, w, b, scale, y, v, c, teacher_scale = two_heads(40, 24, 90, dtype)
    args = (x, w, b.float(), scale, y, v, c.float(), teacher_scale)
    g = [normal(40, seed=seed) for seed in range(3)]
    for share in MIXTURES:
        plain = divergence_and_gradients(args, g, share=share)
        biases = len(plain) - 4, len(plain) - 1
        for factor in (2.0**-22, 2.0**22):
            scaled = divergence_and_gradients(args, [one * factor for one in g], share=share)
            for i in biases:
                torch.testing.assert_close(scaled[i] / factor, plain[i], rtol=1e-6, atol=1e-6)


@case(each_dtype=True)
def divergence_of_finite_logits(dtype: torch.dtype) -> None:
    """Of a class that the student rules out, one that the teacher does, and one that both do."""
    x, w, b, scale, y, v, c, teacher_scale = two_heads(21, 16, 70, dtype)
    b = b.float().index_fill(0, torch.tensor([0, 7], device=DEVICE), -math.inf)
    c = c.float().index_fill(0, torch.tensor([7, 69], device=DEVICE), math.inf)  # whose scale is negative
    args, g = (x, w, b, scale, y, v, c, teacher_scale), [normal(21), normal(21, seed=1), normal(21, seed=2)]
    for share in MIXTURES:
        actual = divergence_and_gradients(args, g, share=share, finite=True)
        wide = tuple(t.double() if isinstance(t, Tensor) else t for t in args)
        out = divergence.linear_divergence_chunked(*wide, share=share, finite=True)
        grads = divergence.linear_divergence_backward_chunked(
            *wide, *out, *(one.double() for one in g[:2]), *[True] * 6, g_student_kl=g[2].double() if share else None,
            share=share, finite=True,
        )  # fmt: skip
        for a, e in zip(actual, (*out[: 3 if share else 2], *grads), strict=True):
            assert bool(a.isfinite().all())
            assert relative_error(a, e) < (3e-6 if dtype == torch.float32 else 6e-3)


@case(each_dtype=True)
def divergence_gradients_that_are_not_needed(dtype: torch.dtype) -> None:
    args, g = two_heads(20, 24, 90, dtype), [normal(20), normal(20)]
    for options in ({}, {"share": 0.3, "g_student_kl": normal(20)}):
        out = divergence_cuda.linear_divergence(*args, share=options.get("share", 0.0))
        full = divergence_cuda.linear_divergence_backward(*args, *out, *g, *[True] * 6, **options)
        for wanted in range(6):
            needs = (i == wanted for i in range(6))
            some = divergence_cuda.linear_divergence_backward(*args, *out, *g, *needs, **options)
            for i, (have, all_of_it) in enumerate(zip(some, full, strict=True)):
                assert torch.equal(have, all_of_it if i == wanted else all_of_it.new_zeros((0,)))


@case(each_dtype=True)
def divergence_has_the_same_bits_every_time(dtype: torch.dtype) -> None:
    args = two_heads(*sizes((500, 256, 5003), (20, 24, 90)), dtype)
    g = [normal(args[0].shape[0], seed=seed) for seed in range(3)]
    for share in MIXTURES:
        runs = [divergence_and_gradients(args, g, transform=SOFTCAP, share=share) for _ in range(3)]
        assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))


@case()
def divergence_never_makes_the_logits() -> None:
    rows, hidden, vocab = 96, 8, 211
    args = two_heads(rows, hidden, vocab, torch.float32)
    with small_windows(32 * rows * 8), LargestTensor() as spy:
        divergence_and_gradients(args, [normal(rows), normal(rows)], transform=SOFTCAP)
    # The interpreter copies what kernels are given, as bytes.
    assert spy.elements < rows * vocab / 3 * (1 if HAS_GPU else 4), spy.op


@case(gpu_only=True, each_dtype=True)
def divergence_in_a_cuda_graph_and_without_waiting(dtype: torch.dtype) -> None:
    args = two_heads(500, 256, 5003, dtype)
    g = [normal(500, seed=seed) for seed in range(3)]
    for share in MIXTURES:
        check_capture(lambda share=share: divergence_and_gradients(args, g, transform=SOFTCAP, share=share))


# --- pytest's side, and the interpreting process's ------------------------------------------------------------


interpreted, test_kernels = made_of(case, __file__)


if __name__ == "__main__":
    case.main()
