"""The head of a transformers model, for the fused kernel: how it changes its logits, and log-probs under FSDP."""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType
from typing import Any
from unittest.mock import patch

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.nn import functional as F
from transformers.modeling_outputs import MoeModelOutputWithPast

from spiral_mega.errors import UserError
from spiral_mega.kernels import linear_logprob
from spiral_mega.packing.tree_batch import TreeBatch


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """What a model makes of its head's output z: scale * softcap * tanh(z / softcap), or scale * z."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, z: torch.Tensor) -> torch.Tensor:
        return self.scale * (
            z if self.softcap is None else self.softcap * torch.tanh(z / self.softcap)
        )


class _UnsupportedHeadError(Exception):
    """The logits are not those of a linear head, scaled and capped by tanh."""


def detect_logit_transform(model: Any) -> LogitTransform:
    """Detect what `model`, on any device, does to its logits after its linear head (Gemma caps,
    Granite divides them).

    Runs the model's own forward between a backbone and a head that return known numbers, so that no
    transform goes unnoticed. Raises UserError for a model that does anything else to its logits.
    """
    try:
        return _probe(model)
    except _UnsupportedHeadError as error:
        reason = str(error)
    except (
        Exception
    ) as error:  # a forward that is not backbone, head, arithmetic may fail in any way
        reason = f"{type(error).__name__}: {error}"
    raise UserError(
        f"model.path leads to {type(model).__name__}, whose log-probs cannot be taken from its "
        f"head ({reason}): use a model whose logits are those of a linear head, possibly scaled "
        "and capped by tanh"
    )


def _probe(model: Any) -> LogitTransform:
    """Run the model's forward on known numbers and find the transform that explains its logits."""
    head = model.get_output_embeddings()
    if model.base_model is model or type(head) is not nn.Linear:
        raise _UnsupportedHeadError(f"its head is {type(head).__name__}")
    # From the first the scale is read, from the second the cap; all are checked.
    z = torch.cat([torch.tensor([2.0**-10, 1e6]), torch.linspace(-100, 100, 201)]).double()
    logits = _logits_for(model, head, z)
    scale = float(logits[0] / z[0])
    scale = round(scale) if abs(scale - round(scale)) < 1e-6 else scale
    limit = float(logits[1]) / scale if scale else 0.0
    transform = LogitTransform(float(scale), None if abs(limit) > 0.99e6 else limit)
    if not scale > 0 or not torch.allclose(transform(z), logits.double(), rtol=1e-5, atol=0):
        raise _UnsupportedHeadError("its logits are neither scaled nor capped by tanh")
    return transform


def _logits_for(model: Any, head: nn.Linear, z: torch.Tensor) -> torch.Tensor:
    """Return the logits of the model's forward where its head returns `z`."""
    hidden = torch.linspace(-1, 1, head.in_features)[None, None]
    head_inputs: list[torch.Tensor] = []

    def backbone_forward(*_: Any, **__: Any) -> MoeModelOutputWithPast:
        output = MoeModelOutputWithPast(last_hidden_state=hidden)
        output.cross_attentions = None  # read by GPT-2 and models like it
        return output

    def head_forward(head_input: torch.Tensor) -> torch.Tensor:
        head_inputs.append(head_input)
        return z[None, None]

    patched_backbone = patch.object(model.base_model, "forward", backbone_forward)
    with patched_backbone, patch.object(head, "forward", head_forward), torch.no_grad():
        logits = model(input_ids=torch.zeros(1, 1, dtype=torch.long), use_cache=False).logits[0, 0]
    if len(head_inputs) != 1 or not torch.equal(head_inputs[0], hidden):
        raise _UnsupportedHeadError("its head does not read its backbone's output unchanged")
    return logits


def register_logprobs(model: Any, transform: LogitTransform) -> None:
    """Give `model`, sharded by FSDP, a method `logprobs(batch, temperature)`: see `_logprobs`.

    FSDP gathers weights before it and frees them after it, as for forward.
    """

    def logprobs(
        self: Any, batch: TreeBatch, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        base = self.get_base_model() if isinstance(self, PeftModel) else self
        return _logprobs(base, transform, batch, temperature)

    model.logprobs = MethodType(logprobs, model)
    register_fsdp_forward_method(model, "logprobs")


def _logprobs(
    model: Any, transform: LogitTransform, batch: TreeBatch, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute log-probs [U] of the distinct response tokens under softmax(logits / temperature),
    and entropies [U].

    All T rows go through the backbone, and only the U rows that predict a response token through
    the head.
    """
    hidden_1TH = model.base_model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        use_cache=False,
        **batch.attention_kwargs(),
    ).last_hidden_state
    hidden_UH = hidden_1TH[0, batch.logit_indices]
    head, adapter = model.get_output_embeddings(), None
    if isinstance(head, LoraLayer):
        adapter = _head_adapter(head, hidden_UH)
        head = head.get_base_layer()
    result = linear_logprob(
        hidden_UH,
        head.weight,
        batch.labels,
        bias=head.bias,
        adapter=adapter,
        temperature=temperature / transform.scale,
        softcap=transform.softcap,
    )
    assert result.entropy is not None
    return result.logprob, result.entropy


def _head_adapter(head: Any, hidden_UH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return scale * hidden A^T [U, R] and B [V, R] of the head's active adapter, None if adapters
    are disabled.

    As a second product the adapter costs U * (H + V) * R; merged into the weight it would cost a
    copy of the weight and a gradient of its size.
    """
    if head.disable_adapters:
        return None
    (name,) = head.active_adapters
    low_rank_UR = head.scaling[name] * F.linear(hidden_UH, head.lora_A[name].weight)
    return low_rank_UR, head.lora_B[name].weight
