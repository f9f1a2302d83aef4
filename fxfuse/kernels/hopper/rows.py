"""Lists of rows: which rows have work, and their hidden states side by side.

How many rows have work is known to the device only. So lists are as long as all rows, with their length in device
memory, and every kernel reads it there. Without a list it is every row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .schedule import begin, chunk_bounds, listed_row, span_rows, transformed_products


@triton.jit
def weigh(c, statistic):
    """A zero coefficient also silences a statistic that is not finite."""
    return tl.where(c == 0, 0.0, c * statistic)


@triton.jit
def _has_work(
    lse, picked, class_sum, entropy, index, total, g_lse, g_picked, row, inside, indexed, OF_LOSS: tl.constexpr
):  # fmt: skip
    """Whether rows have upstream gradients; if OF_LOSS, from coefficients, and the gradients are stored if wanted."""
    g = tl.zeros(row.shape, tl.float32)
    if lse is not None:
        g = tl.load(lse + row, mask=inside, other=0.0)
    work = row < 0
    for k in range(indexed):
        at = row.to(tl.int64) * indexed + k
        c = tl.load(picked + at, mask=inside, other=0.0)
        if OF_LOSS:
            c = tl.where(tl.load(index + at, mask=inside, other=-1) >= 0, c, 0.0)
            # log_prob is picked - lse, so its coefficient counts for both; that of log_prob_sum likewise.
            g -= c
            if g_picked is not None:
                tl.store(g_picked + at, c, mask=inside)
        work = work | (c != 0)
    if class_sum is not None:
        c = tl.load(class_sum + row, mask=inside, other=0.0)
        if OF_LOSS:
            g -= weigh(c, total)
        work = work | (c != 0)
    if g_lse is not None:
        tl.store(g_lse + row, g, mask=inside)
    work = work | (g != 0)
    if entropy is not None:
        work = work | (tl.load(entropy + row, mask=inside, other=0.0) != 0)
    return (work & inside).to(tl.int32)


@triton.jit
def _list(order, length, row, flag, before, rows, BLOCK: tl.constexpr):
    """List a program's rows after those of the programs before; the last one knows how many there are."""
    tl.store(order + before + tl.cumsum(flag, 0) - flag, row, mask=flag != 0)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        found = before + tl.sum(flag, 0)
        tl.store(length, found)
        # The list may be an op's result, which should be the same every time.
        for start in range(found, rows, BLOCK):
            rest = start + tl.arange(0, BLOCK)
            tl.store(order + rest, 0, mask=rest < rows)


@triton.jit
def total_of(total, vocab):
    """What the weights of all classes add up to."""
    return tl.load(total) if total is not None else vocab.to(tl.float32)


@triton.jit(do_not_specialize=["rows", "vocab", "indexed"])
def list_kernel(
    lse,  # [rows] float32, or None for zeros
    picked,  # [rows, K] float32
    class_sum,  # [rows] float32, or None
    entropy,  # [rows] float32, or None
    index,  # [rows, K] int64
    total,  # [] float32: the sum of the classes' weights, or None if each is 1
    g_lse,  # [rows] float32, out; None to take ``lse``, ``picked`` and ``class_sum`` as they are
    g_picked,  # [rows, K] float32, out, or None
    order,  # [rows] int32, out: zeros past the end
    length,  # [1] int32, out
    rows,
    vocab,
    indexed,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """List the rows that have upstream gradients, ascending: so many a program, which counts those before them.

    With ``g_lse`` and ``g_picked``, these are made: ``picked`` and ``class_sum`` are then coefficients of log_prob and
    log_prob_sum.
    """
    begin(PDL)
    of_all = total_of(total, vocab)
    of_loss: tl.constexpr = g_lse is not None
    first = tl.program_id(0) * BLOCK
    before = 0
    for start in tl.range(0, first, WIDE, loop_unroll_factor=4):
        row = start + tl.arange(0, WIDE)
        flag = _has_work(lse, picked, class_sum, entropy, index, of_all, None, None, row, row < first, indexed, of_loss)
        before += tl.sum(flag, 0)
    row = first + tl.arange(0, BLOCK)
    flag = _has_work(lse, picked, class_sum, entropy, index, of_all, g_lse, g_picked, row, row < rows, indexed, of_loss)
    _list(order, length, row, flag, before, rows, BLOCK)


@triton.jit(do_not_specialize=["rows"])
def list_flagged_kernel(
    flags,  # [rows] int8
    order,  # [rows] int32, out: zeros past the end
    length,  # [1] int32, out
    rows,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """List the rows whose flag is set in the same way."""
    begin(PDL)
    first = tl.program_id(0) * BLOCK
    before = 0
    for start in tl.range(0, first, WIDE, loop_unroll_factor=4):
        row = start + tl.arange(0, WIDE)
        before += tl.sum((tl.load(flags + row, mask=row < first, other=0) != 0).to(tl.int32), 0)
    row = first + tl.arange(0, BLOCK)
    flag = (tl.load(flags + row, mask=row < rows, other=0) != 0).to(tl.int32)
    _list(order, length, row, flag, before, rows, BLOCK)


@triton.jit(do_not_specialize=["rows", "vocab", "indexed"])
def loss_kernel(
    lse,  # [rows] float32
    log_prob,  # [rows, K] float32
    class_sum,  # [rows] float32, or None
    index,  # [rows, K] int64
    total,  # [] float32: the sum of the classes' weights, or None if each is 1
    c_log_prob,  # [rows, K] float32
    c_log_prob_sum,  # [rows] float32, or None
    loss,  # [] float32, out
    rows,
    vocab,
    indexed,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The statistics times their coefficients, added up in a fixed order."""
    begin(PDL)
    of_all = total_of(total, vocab)
    losses = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        inside = row < rows
        # The terms of a row first: they may cancel.
        term = tl.zeros((BLOCK,), tl.float32)
        for k in range(indexed):
            at = row.to(tl.int64) * indexed + k
            known = inside & (tl.load(index + at, mask=inside, other=-1) >= 0)
            c = tl.load(c_log_prob + at, mask=known, other=0.0)
            term += weigh(c, tl.load(log_prob + at, mask=known, other=0.0))
        if class_sum is not None:
            c = tl.load(c_log_prob_sum + row, mask=inside, other=0.0)
            log_prob_sum = tl.load(class_sum + row, mask=inside, other=0.0)
            log_prob_sum -= of_all * tl.load(lse + row, mask=inside, other=0.0)
            term += weigh(c, log_prob_sum)
        losses += term
    tl.store(loss, tl.sum(losses, 0))


@triton.jit(do_not_specialize=["chunk", "most", "indexed"])
def gather_kernel(
    x,  # [N, D]
    index,  # [N, K] int64
    picked,  # [N, K] float32; for offsets only
    order,  # [N] int32; or None for every row of a SPAN
    length,  # [1] int32, or None with it
    gathered,  # [most, D], out
    offset,  # [most] float32, out; or None
    row_sum,  # [D] float32: the sum of the classes' weights, or None
    bias_sum,  # [] float32: the sum of their biases, or None
    class_sum,  # [N] float32, out; or None
    scale,
    chunk,  # or the first row of a SPAN
    most,
    vocab,
    hidden,
    indexed,
    x_row,
    x_col,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    SPAN: tl.constexpr,
    PDL: tl.constexpr,
):
    """The hidden states of a chunk's rows, or a SPAN's, and more: offsets, sums.

    An offset is the largest indexed logit, 0 if none is finite.
    """
    begin(PDL)
    if SPAN:
        start, rows = chunk, span_rows(length, chunk, most)
    else:
        start, rows = chunk_bounds(tl.load(length), chunk, most, ROWS)
    at = tl.program_id(0)
    if at >= tl.cdiv(rows, ROWS) * ROWS:
        return
    # Rows that fill up the last block are zeros.
    there = at < rows
    row = listed_row(order, start + at, there)
    width = tl.where(there, hidden, 0)
    d = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in range(0, hidden, BLOCK):
        values = tl.load(x + row * x_row + (k + d).to(tl.int64) * x_col, mask=k + d < width, other=0.0)
        tl.store(gathered + at.to(tl.int64) * hidden + k + d, values, mask=k + d < hidden)
        if row_sum is not None:
            total += values.to(tl.float32) * tl.load(row_sum + k + d, mask=k + d < hidden, other=0.0)
    if row_sum is not None:
        of_classes = tl.sum(total, 0)
        if bias_sum is not None:
            of_classes += tl.load(bias_sum)
        tl.store(class_sum + row, of_classes * scale, mask=there)
    if offset is not None:
        best = float("-inf")
        for k in range(indexed):
            label = tl.load(index + row * indexed + k, mask=there, other=-1)
            z = tl.load(picked + row * indexed + k, mask=(label >= 0) & (label < vocab), other=float("-inf"))
            best = tl.where(z > best, z, best)
        tl.store(offset + at, tl.where(tl.abs(best) < float("inf"), best, 0.0))


@triton.jit(do_not_specialize=["indexed", "most"])
def pick_kernel(
    x,  # [N, D]
    w,  # [V, D]
    bias,  # [V] or None
    index,  # [N, K] int64
    order,  # [N] int32, or None: every row
    length,  # [1] int32, or None with it
    picked,  # [N, K] float32, out: 0 where the index is no class
    slope,  # [N, K] float32, out: the derivative of the transform there; or None
    scale,
    vocab,
    hidden,
    indexed,
    most,  # rows
    x_row,
    x_col,
    w_row,
    w_col,
    x_step,  # BK * x_col and BK * w_col, made on the host: they may exceed 32 bits
    w_step,
    SCALED: tl.constexpr,
    TRANSFORM: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Indexed logits of the listed rows, by matrix products whose diagonals they are.

    The tensor cores add up each element of a product in the same order, whatever its place in a tile and, on Hopper,
    the size of that. So these have the very bits that the same logits have in the statistics, as they must: a
    log-probability is their small difference.
    """
    begin(PDL)
    rows = span_rows(length, 0, most)
    if tl.program_id(0) * BM >= rows:
        return
    at = tl.program_id(0) * BM + tl.arange(0, BM)
    there = at < rows
    row = listed_row(order, at, there)
    k = tl.program_id(1)
    label = tl.load(index + row * indexed + k, mask=there, other=-1)
    known = (label >= 0) & (label < vocab)
    label = tl.where(known, label, 0)
    d = tl.arange(0, BK)
    a_at = x + row[:, None] * x_row + d.to(tl.int64)[None, :] * x_col
    b_at = w + label[:, None] * w_row + d.to(tl.int64)[None, :] * w_col
    z = tl.zeros((BM, BM), tl.float32)
    for start in range(0, hidden, BK):
        inside = d < hidden - start
        a = tl.load(a_at, mask=there[:, None] & inside[None, :], other=0.0)
        b = tl.load(b_at, mask=known[:, None] & inside[None, :], other=0.0)
        z = tl.dot(a, b.T, z)
        a_at += x_step
        b_at += w_step
    if bias is not None:
        z += tl.load(bias + label, mask=known, other=0.0).to(tl.float32)[None, :]
    diagonal = tl.arange(0, BM)[:, None] == tl.arange(0, BM)[None, :]
    z = tl.sum(tl.where(diagonal, z, 0.0), 1)
    z, derivative = transformed_products(z, scale, SCALED, TRANSFORM)
    tl.store(picked + row * indexed + k, tl.where(known, z, 0.0), mask=there)
    if slope is not None:
        tl.store(slope + row * indexed + k, tl.where(known, derivative, 0.0), mask=there)


@triton.jit
def _place(order, count, row):
    """How many of the list's ``count`` rows come before ``row``."""
    low = row * 0
    high = low + count
    while tl.max(high - low, 0) > 0:
        middle = (low + high) // 2
        before = tl.load(order + middle, mask=low < high, other=0) < row
        low, high = tl.where((low < high) & before, middle + 1, low), tl.where((low < high) & ~before, middle, high)
    return low


@triton.jit(do_not_specialize=["first", "most", "rows"])
def take_kernel(
    listed,  # [N, D]: one row for each row of the list
    taken,  # [most, D], out: those that ``put_kernel`` will need, one after the other
    order,  # [N] int32, ascending
    length,  # [1] int32
    first,
    most,
    rows,
    hidden,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy what the rows from ``first`` on have in the list's order; nothing if all rows are listed."""
    begin(PDL)
    count = tl.load(length)
    if count == rows:
        return
    bounds = _place(order, count, first + most * tl.arange(0, 2))
    start, stop = tl.min(bounds, 0), tl.max(bounds, 0)
    at = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    there = (start + at < stop)[:, None]
    for block in range(0, hidden, BLOCK):
        col = block + tl.arange(0, BLOCK)[None, :]
        mask = there & (col < hidden)
        value = tl.load(listed + (start + at).to(tl.int64)[:, None] * hidden + col, mask=mask)
        tl.store(taken + at.to(tl.int64)[:, None] * hidden + col, value, mask=mask)


@triton.jit(do_not_specialize=["first", "most", "rows"])
def put_kernel(
    out,  # [N, D], out
    taken,  # [most, D]
    order,
    length,
    first,
    most,
    rows,
    hidden,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Put what ``take_kernel`` took to the rows that it is of, and zeros to those that are not listed."""
    begin(PDL)
    count = tl.load(length)
    if count == rows:
        return
    start = tl.min(_place(order, count, first + tl.arange(0, 2)), 0)
    row = first + tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    inside = (row < tl.minimum(first + most, rows))[:, None]
    place = _place(order, count, row)
    is_listed = ((place < count) & (tl.load(order + place, mask=place < count, other=-1) == row))[:, None]
    for block in range(0, hidden, BLOCK):
        col = block + tl.arange(0, BLOCK)[None, :]
        mask = inside & (col < hidden)
        value = tl.load(taken + (place - start).to(tl.int64)[:, None] * hidden + col, mask=mask & is_listed, other=0.0)
        tl.store(out + row.to(tl.int64)[:, None] * hidden + col, value, mask=mask)
