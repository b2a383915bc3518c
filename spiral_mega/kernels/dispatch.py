"""Log-probs, log-sum-exps and entropies of a language model's head in one pass, never with many logits in memory."""

from __future__ import annotations

import math
from dataclasses import replace
from types import ModuleType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from spiral_mega.kernels import cpu, vocab_parallel, whole_logits
from spiral_mega.kernels.gradients import allocate
from spiral_mega.kernels.logits import LinearLogprob, Logits, Term, Upstream, accumulator

Backend = Literal["auto", "reference", "cpu", "triton"]
PLAIN_ELEMENTS = 2**20  # of logits and of weight: up to here whole ones cost less than the bookkeeping of tiles


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
    """log softmax(x)[target], log sum exp(x) and the entropy of softmax(x), for logits

        x = softcap * tanh(z / softcap) / temperature,    z = hidden @ weight^T + bias (+ adapter)

    (without `softcap`, x = z / temperature). `hidden` [T, H], `weight` [V, H], `targets` [T] integers in [0, V), `bias`
    [V]; `adapter`: a pair u [T, R], B [V, R] that adds u @ B^T, which is LoRA on the head for u = scale * hidden @ A^T,
    without a merged copy of the weight. Floating-point tensors share one type: float32, bfloat16, float16 or float64.

    Returns [T] tensors in nats, float32 (float64 for float64); the entropy is None without `with_entropy`. Gradients
    flow through all three to hidden, weight, bias and adapter, once (no second derivatives). Rows whose upstream
    gradients are all zero cost nothing in the backward pass. A target outside the vocabulary has log-prob -inf (the
    reference raises); a row of logits that is -inf throughout gives NaN, as log_softmax does.

    `vocab_parallel_group`: weight, bias and B hold this rank's share of the vocabulary, from entry `vocab_start` on
    (default: rank * V, for shards of equal size); hidden, u and targets, the latter counted in the whole vocabulary,
    are equal on all ranks. Every rank gets the whole result, and must go through backward with the same upstream
    gradients; gradients of hidden and u come back summed over the group. `vocab_size`: the number of real entries; rows
    of weight at or past it are padding, and count for nothing.

    `backend`: `auto` takes triton for CUDA tensors; on CPU, cpu, or reference when logits and weight are small and of
    full precision.

    Raises ValueError for shapes, types, temperature, softcap or backend that make no sense.
    """
    start = 0
    if vocab_parallel_group is not None:
        rank = dist.get_rank(vocab_parallel_group)
        start = rank * len(weight) if vocab_start is None else vocab_start
    logits = _logits(hidden, weight, targets, bias, adapter, temperature, softcap)
    if vocab_size is not None:
        logits = logits.columns(slice(0, min(max(vocab_size - start, 0), len(weight))))
    name = _choose(backend, logits, sharded=vocab_parallel_group is not None)
    if name == "reference":
        return whole_logits.linear_logprob(logits, targets, with_entropy)
    tensors = [tensor for term in logits.terms for tensor in term]
    grad = torch.is_grad_enabled()
    outputs = _LinearLogprob.apply(  # type: ignore[no-untyped-call]
        _module(name), logits, targets - start, with_entropy, vocab_parallel_group, grad, logits.bias, *tensors
    )
    return LinearLogprob(*outputs)


def _logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None,
    adapter: tuple[torch.Tensor, torch.Tensor] | None,
    temperature: float,
    softcap: float | None,
) -> Logits:
    terms = (Term(hidden, weight), *([] if adapter is None else [Term(*adapter)]))
    for x, w in terms:
        if x.dim() != 2 or w.dim() != 2 or x.shape[1] != w.shape[1]:
            raise ValueError(f"shapes {list(x.shape)} and {list(w.shape)}: expected [T, H] and [V, H]")
        if len(x) != len(hidden) or len(w) != len(weight):
            raise ValueError(f"adapter of {list(x.shape)} and {list(w.shape)} for {len(hidden)} rows, {len(weight)}")
    if targets.shape != (len(hidden),) or targets.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"targets {list(targets.shape)} {targets.dtype}: expected [{len(hidden)}] integers")
    if bias is not None and bias.shape != (len(weight),):
        raise ValueError(f"bias of shape {list(bias.shape)}: expected [{len(weight)}]")
    dtypes = {tensor.dtype for term in terms for tensor in term} | ({bias.dtype} if bias is not None else set())
    if len(dtypes) != 1 or not dtypes <= {torch.float32, torch.bfloat16, torch.float16, torch.float64}:
        raise ValueError(f"tensors of {', '.join(sorted(map(str, dtypes)))}: expected one floating-point type")
    for name, value in {"temperature": temperature, "softcap": softcap}.items():
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} {value}: expected a positive number")
    return Logits(terms, bias, temperature, softcap)


def _choose(backend: Backend, logits: Logits, sharded: bool) -> str:
    if backend not in ("auto", "reference", "cpu", "triton"):
        raise ValueError(f"backend {backend!r}: expected auto, reference, cpu or triton")
    if sharded and backend == "reference":
        raise ValueError("backend 'reference' does not know sharded weights: use auto")
    if backend != "auto":
        return backend
    if logits.terms[0].input.device.type == "cuda":
        return "triton"
    (rows, columns), features = logits.shape, logits.terms[0].input.shape[1]
    # `cpu` rounds half-precision logits as the model's own head, and so an engine, does; `reference` does not.
    half = logits.terms[0].input.dtype in (torch.bfloat16, torch.float16)
    small = columns * max(rows, features) <= PLAIN_ELEMENTS
    return "reference" if small and not half and not sharded else "cpu"


def _module(name: str) -> ModuleType:
    if name == "cpu":
        return cpu
    from spiral_mega.kernels import gpu  # Triton need not be installed where there is none

    return gpu


class _LinearLogprob(torch.autograd.Function):
    """The backend gives statistics of rows and adds up gradients; this is what does not depend on the device."""

    @staticmethod
    def forward(
        ctx: Any,
        backend: ModuleType,
        logits: Logits,
        targets: torch.Tensor,
        with_entropy: bool,
        group: dist.ProcessGroup | None,
        grad: bool,
        bias: torch.Tensor | None,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        logits = _operands(backend, logits)
        if grad and any(ctx.needs_input_grad) and math.prod(logits.shape) <= backend.KEPT_ELEMENTS:
            logits = replace(logits, kept=targets.new_empty(logits.shape, dtype=accumulator(tensors[0].dtype)))
        statistics = backend.statistics(logits, targets, with_entropy)
        if group is not None:
            statistics = vocab_parallel.merge(statistics, group)
        outputs = statistics.outputs(with_entropy)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(targets, outputs.logsumexp, outputs.entropy, logits.kept, bias, *tensors)
        ctx.backend, ctx.temperature, ctx.softcap, ctx.group = backend, logits.temperature, logits.softcap, group
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream_gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        targets, logsumexp, entropy, kept, bias, *tensors = ctx.saved_tensors
        terms = tuple(Term(x, w) for x, w in zip(tensors[::2], tensors[1::2], strict=True))
        logits = _operands(ctx.backend, Logits(terms, bias, ctx.temperature, ctx.softcap, kept))
        upstream = _upstream(targets, logsumexp, entropy, ctx.temperature, *upstream_gradients)
        rows = upstream.nonzero_rows()
        if skipping := len(rows) < len(targets):
            logits, upstream = logits.rows(rows), upstream.rows(rows)
        bias_needed, *needed = ctx.needs_input_grad[6:]
        gradients = allocate(logits, needed[::2], needed[1::2], bias_needed)
        ctx.backend.add_gradients(gradients, logits, upstream)
        if ctx.group is not None:
            vocab_parallel.sum_over_group(gradients.inputs, ctx.group)
        of_tensors: list[torch.Tensor | None] = []
        for (x, _), of_input, of_weight in zip(terms, gradients.inputs, gradients.weights, strict=True):
            if of_input is not None:
                of_input = of_input.to(x.dtype)
                of_input = torch.zeros_like(x).index_copy_(0, rows, of_input) if skipping else of_input
            of_tensors += [of_input, of_weight]
        return None, None, None, None, None, None, gradients.bias, *of_tensors


def _operands(backend: ModuleType, logits: Logits) -> Logits:
    """Inputs in the type that the backend multiplies in."""
    terms = tuple(Term(x.to(backend.operand_dtype(x.dtype)), w) for x, w in logits.terms)
    return replace(logits, terms=terms)


def _upstream(
    targets: torch.Tensor,
    logsumexp: torch.Tensor,
    entropy: torch.Tensor | None,
    temperature: float,
    of_logprob: torch.Tensor | None,
    of_logsumexp: torch.Tensor | None,
    of_entropy: torch.Tensor | None = None,
) -> Upstream:
    """See Upstream. The division by the temperature is taken over the rows, not over the logits."""
    zero = torch.zeros_like(logsumexp)
    of_target = zero if of_logprob is None else of_logprob / temperature
    of_softmax = (zero if of_logsumexp is None else of_logsumexp / temperature) - of_target
    if of_entropy is not None and entropy is not None:
        of_entropy = of_entropy / temperature
        # A row without distribution (entropy NaN) that nothing comes back through must not give NaN.
        of_softmax = of_softmax - (of_entropy * entropy).where(of_entropy != 0, 0)
    return Upstream(targets, logsumexp, of_target, of_softmax, of_entropy)
