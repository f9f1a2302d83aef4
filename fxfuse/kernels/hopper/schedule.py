"""What the kernels share: chunks of a list of rows whose length only the device knows, the order of tiles, a tile."""

from __future__ import annotations

import triton
import triton.language as tl

from ..exponential import LOG2E
from ..transform import transformed


@triton.jit
def begin(PDL: tl.constexpr):
    """Wait for what was launched before: a programmatic dependent launch begins a little before its end.

    The first statement of every kernel here. What comes next is not let in any sooner (``gdc_launch_dependents``),
    which made it slower.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def _chunk_blocks(count, most, BLOCK: tl.constexpr):
    """(blocks of the smaller chunks, how many chunks have one more and come first)."""
    blocks, chunks = tl.cdiv(count, BLOCK), tl.maximum(tl.cdiv(count, most), 1)
    return blocks // chunks, blocks % chunks


@triton.jit
def chunk_bounds(count, chunk, most, BLOCK: tl.constexpr):
    """(first row, number of rows) of a chunk: ``count`` rows cut evenly into chunks of at most ``most``.

    A chunk past the end has no rows. ``most`` is a multiple of ``BLOCK``, and so is every first row.
    """
    each, larger = _chunk_blocks(count, most, BLOCK)
    start = (chunk * each + tl.minimum(chunk, larger)) * BLOCK
    step = (each + (chunk < larger).to(tl.int32)) * BLOCK
    return start, tl.maximum(tl.minimum(count - start, step), 0)


@triton.jit
def span_rows(length, first, most):
    """How many of a span's ``most`` rows the list has: none where it lies past the end; all without a list."""
    if length is not None:
        most = tl.maximum(tl.minimum(tl.load(length) - first, most), 0)
    return most


@triton.jit
def listed_row(order, at, there):
    """The rows at places of a list, int64; without one, the places themselves."""
    row = tl.where(there, at, 0) if order is None else tl.load(order + at, mask=there, other=0)
    return row.to(tl.int64)


@triton.jit
def chunk_of(row, count, most, BLOCK: tl.constexpr):
    """The chunk that has a row, of those in ``chunk_bounds``."""
    each, larger = _chunk_blocks(count, most, BLOCK)
    block, of_larger = row // BLOCK, larger * (each + 1)
    return tl.where(block < of_larger, block // (each + 1), larger + (block - of_larger) // tl.maximum(each, 1))


@triton.jit
def last_chunk(count, most):
    """The last chunk that has rows; 0 if none has."""
    return tl.maximum(tl.cdiv(count, most), 1) - 1


@triton.jit
def product_tile(
    x,
    w,
    row,
    col,
    hidden,
    TRANSPOSED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Rows from ``row`` of x times classes from ``col`` of w, float32 ``[BM, BN]``; 0 outside of both.

    ``w`` describes ``[V, D]`` in blocks ``[BN, BK]``, or if TRANSPOSED ``[D, V]`` in blocks ``[BK, BN]``.
    """
    z = tl.zeros((BM, BN), tl.float32)
    for k in range(tl.cdiv(hidden, BK)):
        a = x.load([row, k * BK])
        b = w.load([k * BK, col]) if TRANSPOSED else w.load([col, k * BK]).T
        z = tl.dot(a, b, z)
    return z


@triton.jit
def left_and_right(z, BM: tl.constexpr, BN: tl.constexpr):
    """The two halves ``[BM, BN // 2]`` of a tile: an epilogue by halves needs half the shared memory to store from."""
    return tl.split(tl.permute(tl.reshape(z, (BM, 2, BN // 2)), (0, 2, 1)))


@triton.jit
def logits_of(z, bias, col, scale, vocab, SCALED: tl.constexpr, TRANSFORM: tl.constexpr):
    """Logits from products ``z [BM, W]`` at the classes ``col [W]``: the bias added, then scaled, then transformed.

    Each step is rounded to float32 the same way, so that a logit has the same bits wherever it is made. The second
    result is the derivative of the transform, the number 1 for the identity.
    """
    if bias is not None:
        z += tl.load(bias + col, mask=col < vocab, other=0.0).to(tl.float32)[None, :]
    return transformed_products(z, scale, SCALED, TRANSFORM)


@triton.jit
def transformed_products(z, scale, SCALED: tl.constexpr, TRANSFORM: tl.constexpr):
    """(scaled and transformed z, the derivative of the transform)."""
    if SCALED:
        return transformed(z, TRANSFORM, scale)
    return transformed(z, TRANSFORM)


@triton.jit
def exponent(z, shift):
    """log2 of exp(z - c), for shift = c * log2(e): one fused operation, which must be the same everywhere.

    Said so, as a compiler that is given two products and their difference may round either of them.
    """
    return tl.fma(z, LOG2E, -shift)


@triton.jit
def log_of_sum(s, c):
    """log of a sum of exp(z - c), without what the rounding of the shift by c put into every term."""
    return tl.log(s) - exponent(c, c * LOG2E) / LOG2E
