"""Heads that do more than a product: the policy's log-probs are those of transformers, or the model is refused."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MiniCPM3Config,
    MixtralConfig,
    PhiConfig,
)

from spiral_mega.distributed.runtime import Runtime, start_runtime
from spiral_mega.errors import UserError
from spiral_mega.policy.fsdp.fsdp_policy import FsdpPolicy
from spiral_mega.policy.fsdp.head import LogitTransform, detect_logit_transform
from tests.policy.reference import load_model, make_sequences, token_logprobs
from tests.support.configs import make_config
from tests.support.tiny_models import END_ID, PAD_ID, VOCAB, tiny_tokenizer

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": PAD_ID,
    "eos_token_id": END_ID,
    "bos_token_id": None,
}
MODELS = {
    "gemma2": (
        Gemma2Config(
            **SHAPE, head_dim=32, attn_logit_softcapping=None, final_logit_softcapping=3.0
        ),
        1.0,
        3.0,
    ),
    "granite": (GraniteConfig(**SHAPE, logits_scaling=8.0), 0.125, None),
    "cohere": (CohereConfig(**SHAPE, logit_scale=0.25), 0.25, None),
    "mixtral": (MixtralConfig(**SHAPE, num_local_experts=2), 1.0, None),
    "phi, whose head has a bias": (PhiConfig(**SHAPE), 1.0, None),
}


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with start_runtime() as runtime:
        yield runtime


@pytest.mark.parametrize("name", MODELS)
def test_logprobs_are_those_of_the_models_own_logits(
    name: str, tmp_path: Path, runtime: Runtime
) -> None:
    config, scale, softcap = MODELS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    form = detect_logit_transform(model)
    assert form.scale == pytest.approx(scale)
    assert form.softcap == pytest.approx(softcap)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1.0 if (parameter == 1).all() else 0.0, 0.3)
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    sequences = make_sequences(tmp_path, 3, seed=0)
    found = FsdpPolicy(
        make_config(tmp_path, rollout={"sampling.temperature": 0.8}), runtime
    ).logprobs(sequences)
    with torch.no_grad():
        expected = torch.cat(
            [token_logprobs(load_model(tmp_path), sequence, 0.8) for sequence in sequences]
        )
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_form_of_gpt2_is_plain() -> None:
    config = GPT2Config(
        vocab_size=VOCAB, n_embd=64, n_layer=1, n_head=2, bos_token_id=None, eos_token_id=END_ID
    )
    assert detect_logit_transform(AutoModelForCausalLM.from_config(config)) == LogitTransform()


class SquaredLlama(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits + 0.1 * output.logits**2
        return output


def test_logits_of_another_form_are_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"SquaredLlama.*neither scaled nor capped"):
        detect_logit_transform(SquaredLlama(LlamaConfig(**SHAPE)))
    scaled = MiniCPM3Config(**SHAPE, q_lora_rank=16, kv_lora_rank=16, dim_model_base=16)
    with pytest.raises(UserError, match=r"MiniCPM3.*does not read its backbone's output unchanged"):
        detect_logit_transform(AutoModelForCausalLM.from_config(scaled))
