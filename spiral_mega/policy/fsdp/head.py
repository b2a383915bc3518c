"""A causal model's head as the fused kernel takes it: what the model makes of its logits, and log-probs under FSDP."""

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
class LogitForm:
    """The model's logits from its head's output z: scale * softcap * tanh(z / softcap), or scale * z."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, z: torch.Tensor) -> torch.Tensor:
        return self.scale * (z if self.softcap is None else self.softcap * torch.tanh(z / self.softcap))


def read_logit_form(model: Any) -> LogitForm:
    """What `model`, on any device, does to its logits after its linear head (Gemma caps them, Granite divides them).

    Found by running its own forward between a backbone and a head that give known numbers, so that no model's logits
    are taken for plain when they are not. Raises UserError for a model whose logits have another form.
    """
    try:
        form, reason = _probe(model)
    except Exception as error:  # a forward that is not backbone, head, arithmetic fails in its own way
        form, reason = None, f"{type(error).__name__}: {error}"
    if form is None:
        raise UserError(
            f"model.path leads to {type(model).__name__}, whose log-probs cannot be taken from its head ({reason}): "
            "use a model whose logits are those of a linear head, possibly scaled and capped by tanh"
        )
    return form


def _probe(model: Any) -> tuple[LogitForm | None, str]:
    backbone, head = model.base_model, model.get_output_embeddings()
    if backbone is model or type(head) is not nn.Linear:
        return None, f"its head is {type(head).__name__}"
    hidden = torch.linspace(-1, 1, head.in_features)[None, None]
    z = torch.cat([torch.tensor([2.0**-10, 1e6]), torch.linspace(-100, 100, 201)]).double()
    into_head: list[torch.Tensor] = []

    def give_hidden(*_: Any, **__: Any) -> MoeModelOutputWithPast:
        output = MoeModelOutputWithPast(last_hidden_state=hidden)
        output.cross_attentions = None  # which GPT-2 and its kin pass on
        return output

    def give_logits(given: torch.Tensor) -> torch.Tensor:
        into_head.append(given)
        return z[None, None]

    with patch.object(backbone, "forward", give_hidden), patch.object(head, "forward", give_logits), torch.no_grad():
        logits = model(input_ids=torch.zeros(1, 1, dtype=torch.long), use_cache=False).logits[0, 0]
    if len(into_head) != 1 or not torch.equal(into_head[0], hidden):
        return None, "its head is not given what its backbone gives"
    scale = float(logits[0] / z[0])
    scale = round(scale) if abs(scale - round(scale)) < 1e-6 else scale
    limit = float(logits[1]) / scale if scale else 0.0
    form = LogitForm(float(scale), None if abs(limit) > 0.99e6 else limit)
    if not scale > 0 or not torch.allclose(form(z), logits.double(), rtol=1e-5, atol=0):
        return None, "its logits are neither scaled nor capped by tanh"
    return form, ""


def register_logprobs(model: Any, form: LogitForm) -> None:
    """Give `model`, sharded by FSDP, a method `logprobs(batch, temperature)`, before and after which FSDP gathers and
    frees weights as it does for forward; see `_logprobs`."""

    def logprobs(self: Any, batch: TreeBatch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        return _logprobs(self.get_base_model() if isinstance(self, PeftModel) else self, form, batch, temperature)

    model.logprobs = MethodType(logprobs, model)
    register_fsdp_forward_method(model, "logprobs")


def _logprobs(model: Any, form: LogitForm, batch: TreeBatch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs [U] of the distinct response tokens under softmax(logits / temperature), and entropies [U].

    Only the U rows that predict a response token reach the head.
    """
    hidden = model.base_model(
        input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, **batch.attention_kwargs()
    ).last_hidden_state[0, batch.logit_indices]
    head, adapter = model.get_output_embeddings(), None
    if isinstance(head, LoraLayer):
        # As a second product the adapter costs R * (H + V) * rank; merged into the weight it would cost a copy of the
        # weight and a gradient of its size.
        if not head.disable_adapters:
            (name,) = head.active_adapters
            low_rank = head.scaling[name] * F.linear(hidden, head.lora_A[name].weight)
            adapter = low_rank, head.lora_B[name].weight
        head = head.get_base_layer()
    result = linear_logprob(
        hidden,
        head.weight,
        batch.labels,
        bias=head.bias,
        adapter=adapter,
        temperature=temperature / form.scale,
        softcap=form.softcap,
    )
    assert result.entropy is not None
    return result.logprob, result.entropy
