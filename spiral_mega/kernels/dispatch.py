"""Log-probs, log-sum-exps and entropies from hidden states and the head's weight, without many
logits in memory.

`linear_logprob` checks its arguments, chooses a backend, and computes what does not depend on the
device: which rows and gradients are needed, and the exchange between shards of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from spiral_mega.kernels import cpu, whole_logits
from spiral_mega.kernels.gradients import Gradients, allocate
from spiral_mega.kernels.logits import LinearLogprob, LogitGradient, Logits, Term, accumulator_dtype

Backend = Literal["auto", "reference", "cpu", "triton"]
HALF_DTYPES = (torch.bfloat16, torch.float16)
MAX_WHOLE_ELEMENTS = (
    2**20
)  # of logits and of weight: up to here whole logits cost less than handling tiles


def linear_logprob(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    adapter: tuple[torch.Tensor, torch.Tensor] | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    with_entropy: bool = True,
    vocab_parallel_group: dist.ProcessGroup | None = None,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    backend: Backend = "auto",
) -> LinearLogprob:
    """Compute log softmax(x)[target], log sum exp(x) and the entropy of softmax(x), for logits

        x = softcap * tanh(z / softcap) / temperature,    z = hidden @ weight^T + bias (+ adapter)

    (without `softcap`, x = z / temperature). `hidden` [T, H], `weight` [V, H], `targets` [T]
    integers in [0, V), `bias` [V]; `adapter`: a pair u [T, R], B [V, R] that adds u @ B^T, which is
    LoRA on the head for u = scale * hidden @ A^T, without a merged copy of the weight.
    Floating-point tensors share one dtype: float32, bfloat16, float16 or float64.

    Returns [T] tensors in nats, float32 (float64 for float64); the entropy is None without
    `with_entropy`. Gradients flow through all three to hidden, weight, bias and adapter, once (no
    second derivatives). Rows whose upstream gradients are all zero cost nothing in the backward
    pass. A target outside the vocabulary has log-prob -inf (the reference raises); a row of logits
    that is -inf throughout gives NaN, as log_softmax does.

    `vocab_parallel_group`: weight, bias and B hold this rank's shard of the vocabulary, from entry
    `vocab_start` on (default: rank * V, for shards of equal size); hidden, u and targets, the
    latter counted in the whole vocabulary, are equal on all ranks. Every rank gets the whole
    result, and must go through backward with the same upstream gradients; gradients of hidden and u
    come back summed over the group. `vocab_size`: the number of real entries; rows of weight at or
    past it are padding and contribute nothing.

    `backend`: `auto` takes triton for CUDA tensors; on CPU, cpu, or reference when logits and
    weight are small and in full precision.

    Raises ValueError for invalid shapes, dtypes, temperature, softcap or backend.
    """
    start = 0
    if vocab_parallel_group is not None:
        rank = dist.get_rank(vocab_parallel_group)
        start = rank * len(weight) if vocab_start is None else vocab_start
    terms = (Term(hidden, weight), *([] if adapter is None else [Term(*adapter)]))
    logits = Logits(terms, bias, temperature, softcap)
    _check(logits, targets)
    if vocab_size is not None:
        logits = logits.columns(slice(0, min(max(vocab_size - start, 0), len(weight))))
    name = _choose_backend(backend, logits, sharded=vocab_parallel_group is not None)
    if name == "reference":
        return whole_logits.linear_logprob(logits, targets, with_entropy)
    tensors = [tensor for term in logits.terms for tensor in term]
    grad_enabled = torch.is_grad_enabled()
    outputs = _LinearLogprob.apply(  # type: ignore[no-untyped-call]
        _load_backend(name), logits, targets - start, with_entropy, vocab_parallel_group, grad_enabled, logits.bias,
        *tensors,
    )  # fmt: skip
    return LinearLogprob(*outputs)


def _check(logits: Logits, targets: torch.Tensor) -> None:
    """Raise ValueError for shapes, dtypes and numbers that do not fit together."""
    (hidden, weight), bias = logits.terms[0], logits.bias
    for input, factor in logits.terms:
        if input.dim() != 2 or factor.dim() != 2 or input.shape[1] != factor.shape[1]:
            raise ValueError(
                f"shapes {list(input.shape)} and {list(factor.shape)}: expected [T, H] and [V, H]"
            )
        if len(input) != len(hidden) or len(factor) != len(weight):
            raise ValueError(
                f"adapter of {list(input.shape)} and {list(factor.shape)} for {len(hidden)} rows, "
                f"{len(weight)}"
            )
    if targets.shape != (len(hidden),) or targets.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"targets {list(targets.shape)} {targets.dtype}: expected [{len(hidden)}] integers"
        )
    if bias is not None and bias.shape != (len(weight),):
        raise ValueError(f"bias of shape {list(bias.shape)}: expected [{len(weight)}]")
    dtypes = {tensor.dtype for term in logits.terms for tensor in term} | (
        {bias.dtype} if bias is not None else set()
    )
    if len(dtypes) != 1 or not dtypes <= {torch.float32, torch.float64, *HALF_DTYPES}:
        raise ValueError(
            f"tensors of {', '.join(sorted(map(str, dtypes)))}: expected one floating-point dtype"
        )
    for name, value in {"temperature": logits.temperature, "softcap": logits.softcap}.items():
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} {value}: expected a positive number")


def _choose_backend(backend: Backend, logits: Logits, sharded: bool) -> str:
    if backend not in ("auto", "reference", "cpu", "triton"):
        raise ValueError(f"backend {backend!r}: expected auto, reference, cpu or triton")
    if sharded and backend == "reference":
        raise ValueError("backend 'reference' does not support sharded weights: use auto")
    if backend != "auto":
        return backend
    input = logits.terms[0].input
    if input.device.type == "cuda":
        return "triton"
    (rows, columns), features = logits.shape, input.shape[1]
    small = columns * max(rows, features) <= MAX_WHOLE_ELEMENTS
    # `cpu` rounds half-precision logits as the model's own head, and so an engine, does;
    # `reference` does not.
    half = input.dtype in HALF_DTYPES
    return "reference" if small and not half and not sharded else "cpu"


def _load_backend(name: str) -> ModuleType:
    if name == "cpu":
        return cpu
    from spiral_mega.kernels import gpu  # Triton may not be installed where no GPU is

    return gpu


class _LinearLogprob(torch.autograd.Function):
    """The part that is the same on every device; the backend computes statistics of rows and adds up gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        backend: ModuleType,
        logits: Logits,
        targets: torch.Tensor,
        with_entropy: bool,
        group: dist.ProcessGroup | None,
        grad_enabled: bool,
        bias: torch.Tensor | None,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        logits = _cast_inputs(backend, logits)
        needs_backward = grad_enabled and any(ctx.needs_input_grad)
        if needs_backward and math.prod(logits.shape) <= backend.MAX_SAVED_LOGITS:
            logits = replace(
                logits,
                saved=targets.new_empty(logits.shape, dtype=accumulator_dtype(tensors[0].dtype)),
            )
        statistics = backend.statistics(logits, targets, with_entropy)
        if group is not None:
            statistics = statistics.merge_over(group)
        outputs = statistics.outputs(with_entropy)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            targets, outputs.logsumexp, outputs.entropy, logits.saved, bias, *tensors
        )
        ctx.backend, ctx.temperature, ctx.softcap, ctx.group = (
            backend,
            logits.temperature,
            logits.softcap,
            group,
        )
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        targets, logsumexp, entropy, saved, bias, *tensors = ctx.saved_tensors
        terms = tuple(
            Term(input, weight) for input, weight in zip(tensors[::2], tensors[1::2], strict=True)
        )
        logits = _cast_inputs(ctx.backend, Logits(terms, bias, ctx.temperature, ctx.softcap, saved))
        gradient = _logit_gradient(targets, logsumexp, entropy, ctx.temperature, *upstream)
        rows = gradient.nonzero_rows()
        if len(rows) < len(targets):
            logits, gradient = logits.rows(rows), gradient.rows(rows)
        bias_needed, *needed = ctx.needs_input_grad[6:]
        gradients = allocate(logits, needed[::2], needed[1::2], bias_needed)
        ctx.backend.add_gradients(gradients, logits, gradient)
        if ctx.group is not None:
            _sum_over_group(gradients.inputs, ctx.group)
        return (
            None,
            None,
            None,
            None,
            None,
            None,
            gradients.bias,
            *_in_order(gradients, terms, rows),
        )


def _cast_inputs(backend: ModuleType, logits: Logits) -> Logits:
    """Cast inputs to the dtype that the backend multiplies in; weights are cast tile by tile."""
    terms = tuple(
        Term(input.to(backend.operand_dtype(input.dtype)), weight) for input, weight in logits.terms
    )
    return replace(logits, terms=terms)


def _logit_gradient(
    targets: torch.Tensor,
    logsumexp: torch.Tensor,
    entropy: torch.Tensor | None,
    temperature: float,
    logprob_grad: torch.Tensor | None,
    logsumexp_grad: torch.Tensor | None,
    entropy_grad: torch.Tensor | None = None,
) -> LogitGradient:
    """Return LogitGradient's coefficients, divided by the temperature: T divisions here instead of T V later."""
    zero = torch.zeros_like(logsumexp)
    onehot_coef = zero if logprob_grad is None else logprob_grad / temperature
    softmax_coef = (zero if logsumexp_grad is None else logsumexp_grad / temperature) - onehot_coef
    entropy_coef = entropy_grad
    if entropy_grad is not None and entropy is not None:
        entropy_coef = entropy_grad / temperature
        # A row without a distribution (entropy NaN) and without a gradient must not give NaN.
        softmax_coef = softmax_coef - (entropy_coef * entropy).where(entropy_coef != 0, 0)
    return LogitGradient(targets, logsumexp, onehot_coef, softmax_coef, entropy_coef)


def _sum_over_group(gradients: Sequence[torch.Tensor | None], group: dist.ProcessGroup) -> None:
    """Sum the gradients of the inputs, which all ranks share, as each rank saw its own vocabulary only."""
    for gradient in gradients:
        if gradient is not None:
            dist.all_reduce(gradient, group=group)


def _in_order(
    gradients: Gradients, terms: Sequence[Term], rows: torch.Tensor
) -> list[torch.Tensor | None]:
    """Return the gradients of each term's input and weight in turn; inputs get zeros where no row was computed."""
    ordered: list[torch.Tensor | None] = []
    for (input, _), input_grad, weight_grad in zip(
        terms, gradients.inputs, gradients.weights, strict=True
    ):
        if input_grad is not None:
            input_grad = input_grad.to(input.dtype)
            if len(rows) < len(input):
                input_grad = torch.zeros_like(input).index_copy_(0, rows, input_grad)
        ordered += [input_grad, weight_grad]
    return ordered
