"""Triton kernels: one computes statistics of logits, the other their gradient; neither stores a logit."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

LOWEST: tl.constexpr = tl.constexpr(torch.finfo(torch.float32).min)


@triton.jit
def _add_product(
    sum, x, w, rows, columns, K, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, UPCAST: tl.constexpr
):
    """Return sum [m, n] + x [m, K] @ w [n, K]^T in float32. Rows and columns exist; only K may end within a block."""
    features = tl.arange(0, BLOCK_K)
    x_block = x + rows[:, None].to(tl.int64) * K + features[None, :]
    w_block = w + columns[None, :].to(tl.int64) * K + features[:, None]
    for start in range(0, K, BLOCK_K):
        if EVEN_K:
            a = tl.load(x_block)
            b = tl.load(w_block)
        else:
            inside = features < K - start
            a = tl.load(x_block, mask=inside[None, :], other=0.0)
            b = tl.load(w_block, mask=inside[:, None], other=0.0)
        if UPCAST:  # Triton's interpreter multiplies bfloat16 incorrectly
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        sum = tl.dot(a, b, sum, input_precision="ieee")
        x_block += BLOCK_K
        w_block += BLOCK_K
    return sum


@triton.jit
def _tanh(x):
    # This form is exact at both ends, where exp is 0 or infinite.
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def _logits(
    x, w, x2, w2, bias, rows, columns, K, K2, inverse_temperature, softcap,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_K2: tl.constexpr,
    EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute a tile of logits [m, n]: the sum of the products and the bias, then softcap and temperature."""
    z = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    z = _add_product(z, x, w, rows, columns, K, BLOCK_K, EVEN_K, UPCAST)
    if BLOCK_K2 > 0:
        z = _add_product(z, x2, w2, rows, columns, K2, BLOCK_K2, False, UPCAST)
    if HAS_BIAS:
        z += tl.load(bias + columns)[None, :].to(tl.float32)
    if HAS_SOFTCAP:
        z = softcap * _tanh(z / softcap)
    return z * inverse_temperature


@triton.jit
def _swizzled(pid, num_rows_blocks, num_columns_blocks, GROUP: tl.constexpr):
    """Return a program's row block and column block: GROUP row blocks use a column block before the next is read."""
    per_group = GROUP * num_columns_blocks
    first = pid // per_group * GROUP
    size = min(num_rows_blocks - first, GROUP)
    return first + pid % per_group % size, pid % per_group // size


@triton.jit(do_not_specialize=["T", "splits", "tiles_per_split"])
def statistics_kernel(
    x, w, x2, w2, bias, targets, out, T, V, K, K2, inverse_temperature, softcap, splits, tiles_per_split,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_K2: tl.constexpr,
    EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, WITH_DOT: tl.constexpr,
    GROUP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute out [4, splits, T] float32, the Statistics: each program takes a block of rows through a split of V."""
    row_block, split = _swizzled(tl.program_id(0), tl.cdiv(T, BLOCK_M), splits, GROUP)
    rows = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    clamped_rows = tl.minimum(rows, T - 1)
    target = tl.load(targets + clamped_rows)
    maximum = tl.full((BLOCK_M,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    dot = tl.zeros((BLOCK_M,), tl.float32)
    target_logit = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    end = min(tl.cdiv(V, BLOCK_N), (split + 1) * tiles_per_split)
    for tile in range(split * tiles_per_split, end):
        columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        logits = _logits(
            x, w, x2, w2, bias, clamped_rows, tl.minimum(columns, V - 1), K, K2, inverse_temperature, softcap,
            BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_K2, EVEN_K, HAS_BIAS, HAS_SOFTCAP, UPCAST,
        )  # fmt: skip
        logits = tl.where(columns[None, :] < V, logits, float("-inf"))
        hit = columns[None, :] == target[:, None]
        target_logit = tl.maximum(target_logit, tl.max(tl.where(hit, logits, float("-inf")), 1))
        new_maximum = tl.maximum(maximum, tl.max(logits, 1))
        shift = maximum - new_maximum
        scale = tl.exp(shift)
        logits -= new_maximum[:, None]
        exponentials = tl.exp(logits)
        if WITH_DOT:
            # A token of probability 0 adds nothing; as 0 * -inf it would add NaN.
            products = tl.where(exponentials > 0, exponentials * logits, 0.0)
            dot = scale * (dot + shift * total) + tl.sum(products, 1)
        total = scale * total + tl.sum(exponentials, 1)
        maximum = new_maximum
    place = out + split.to(tl.int64) * T + rows
    step = splits.to(tl.int64) * T
    tl.store(place, maximum, mask=rows < T)
    tl.store(place + step, total, mask=rows < T)
    tl.store(place + 2 * step, dot, mask=rows < T)
    tl.store(place + 3 * step, target_logit, mask=rows < T)


@triton.jit(do_not_specialize=["T"])
def gradient_kernel(
    x, w, x2, w2, bias, targets, logsumexp, onehot_coef, softmax_coef, entropy_coef, out, T, V, K, K2,
    inverse_temperature, softcap,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_K2: tl.constexpr,
    EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ENTROPY: tl.constexpr,
    GROUP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute out [T, V], the gradient of the logits before softcap and temperature (see
    LogitGradient).

    The factor 1 / temperature is in the coefficients.
    """
    row_block, tile = _swizzled(tl.program_id(0), tl.cdiv(T, BLOCK_M), tl.cdiv(V, BLOCK_N), GROUP)
    rows = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    clamped_rows = tl.minimum(rows, T - 1)
    logits = _logits(
        x, w, x2, w2, bias, clamped_rows, tl.minimum(columns, V - 1), K, K2, inverse_temperature, softcap,
        BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_K2, EVEN_K, HAS_BIAS, HAS_SOFTCAP, UPCAST,
    )  # fmt: skip
    logprobs = logits - tl.load(logsumexp + clamped_rows)[:, None]
    factor = tl.load(softmax_coef + clamped_rows)[:, None]
    if HAS_ENTROPY:
        # exp(-1000) is 0, and unlike with -inf, 0 times -1000 is 0.
        factor -= tl.load(entropy_coef + clamped_rows)[:, None] * tl.maximum(logprobs, -1000.0)
    gradient = tl.exp(logprobs) * factor
    hit = columns[None, :] == tl.load(targets + clamped_rows)[:, None]
    gradient += tl.where(hit, tl.load(onehot_coef + clamped_rows)[:, None], 0.0)
    if HAS_SOFTCAP:
        capped = logits / (inverse_temperature * softcap)
        gradient *= 1.0 - capped * capped
    place = out + rows[:, None].to(tl.int64) * V + columns[None, :]
    tl.store(
        place, gradient.to(out.dtype.element_ty), mask=(rows[:, None] < T) & (columns[None, :] < V)
    )
