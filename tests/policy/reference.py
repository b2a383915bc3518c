"""The truth that the policy is held to: plain transformers, peft and torch, whole, one sequence at a time."""

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from spiral_mega.packing.training_sequence import SequenceKey, TrainingSequence
from tests.support.tiny_models import FIRST_WORD_ID, VOCAB

Tensors = dict[str, torch.Tensor]


def load_model(
    folder: Path, lora: dict[str, Any] | None = None, adapters: Tensors | None = None
) -> nn.Module:
    """The unsharded model in float32 with transformers' own eager attention, and with peft's adapters if asked for."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    if lora is None:
        return model
    peft_config = LoraConfig(
        r=lora["rank"], lora_alpha=lora["alpha"], target_modules=lora["targets"]
    )
    adapted = get_peft_model(model, peft_config)
    if adapters is not None:
        load_adapters(adapted, adapters)
    return adapted


def load_adapters(model: PeftModel, adapters: Tensors) -> None:
    """Put `adapters`, all of them and nothing else, into `model`."""
    own = {name for name, _ in model.named_parameters() if ".lora_" in name}
    assert own == adapters.keys()
    model.load_state_dict(adapters, strict=False)


def make_adapters(folder: Path, lora: dict[str, Any], seed: int) -> Tensors:
    """Random adapters that do change the model: peft's own start has B = 0, which hides every error in A."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: 0.2 * torch.randn(parameter.shape, generator=generator)
        for name, parameter in load_model(folder, lora).named_parameters()
        if ".lora_" in name
    }


def token_logprobs(
    model: nn.Module, sequence: TrainingSequence, temperature: float
) -> torch.Tensor:
    """log p of each response token, given all before it."""
    tokens = torch.tensor([[*sequence.prompt_ids, *sequence.response_ids]])
    logits = model(input_ids=tokens, use_cache=False).logits[0, :-1]
    of_response = slice(len(sequence.prompt_ids) - 1, None)
    logprobs = torch.log_softmax(logits[of_response] / temperature, dim=-1)
    return torch.stack(
        [row[token] for row, token in zip(logprobs, sequence.response_ids, strict=True)]
    )


def loss_of(
    model: nn.Module, sequences: Iterable[TrainingSequence], temperature: float = 1.0
) -> torch.Tensor:
    """Sum over sequences and tokens of weight * -exp(log p - log p of the sampler) * advantage; tokens without a
    sampler log-prob count for nothing."""
    total = torch.zeros(())
    for sequence in sequences:
        logprobs = token_logprobs(model, sequence, temperature)
        for logprob, sampler in zip(logprobs, sequence.sampler_logprobs, strict=True):
            if math.isfinite(sampler):
                total = total - sequence.weight * sequence.advantage * torch.exp(logprob - sampler)
    return total


def gradients_of(
    model: nn.Module, sequences: Iterable[TrainingSequence], temperature: float = 1.0
) -> tuple[float, Tensors]:
    """The loss and its gradient by parameter name."""
    model.zero_grad(set_to_none=True)
    loss = loss_of(model, sequences, temperature)
    loss.backward()
    return loss.item(), {
        n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }


def train(
    model: nn.Module,
    batches: Iterable[tuple[float, list[TrainingSequence]]],
    *,
    weight_decay: float,
    eps: float,
    clip: float,
) -> Iterator[tuple[float, Tensors]]:
    """torch's AdamW over (lr, sequences). After each update: the gradient's norm before clipping, and the weights."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], betas=(0.9, 0.95), eps=eps)
    for lr, sequences in batches:
        for group in optimizer.param_groups:
            group["lr"] = lr
        gradients_of(model, sequences)
        norm = torch.nn.utils.clip_grad_norm_(trained, clip)
        optimizer.step()
        yield (
            float(norm),
            {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad},
        )


def make_sequences(
    folder: Path, count: int, seed: int, *, scale: float = 0.01
) -> list[TrainingSequence]:
    """`count` sequences of ragged length, the first with a response of one token, of two components.

    Of a draw's three, the second continues the first's prompt, and the third's prompt is as much of the first as it
    can hold, so that they form a tree. Their sampler is the model at `folder` with errors of
    its own, so that ratios differ from 1.
    """
    rng = random.Random(seed)
    model = load_model(folder)
    sequences = []
    for i in range(count):
        prompt, response = rng.randint(1, 14), 1 if i == 0 else rng.randint(2, 16)
        tokens = [rng.randrange(FIRST_WORD_ID, VOCAB) for _ in range(prompt + response)]
        if i % 3:
            first = sequences[-(i % 3)]
            shared = (
                first.prompt_ids if i % 3 == 1 else [*first.prompt_ids, *first.response_ids][:14]
            )
            tokens, prompt = [*shared, *tokens[-response:]], len(shared)
        bare = TrainingSequence(
            key=SequenceKey(i // 3, i % 3),
            prompt_ids=tokens[:prompt],
            response_ids=tokens[prompt:],
            sampler_logprobs=[],
            advantage=rng.choice([-1.0, 1.0]) * rng.uniform(0.4, 1.6),
            weight=scale * rng.uniform(0.5, 2.0),
        )
        with torch.no_grad():
            logprobs = token_logprobs(model, bare, 1.0).tolist()
        sequences.append(
            replace(bare, sampler_logprobs=[p + rng.uniform(-0.5, 0.5) for p in logprobs])
        )
    return sequences
