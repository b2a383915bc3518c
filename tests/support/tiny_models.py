"""Real models of a few thousand weights in Hugging Face format: weights, config, tokenizer, chat template."""

from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

Family = Literal["qwen3", "llama", "qwen2", "qwen3_moe"]
CLASSES: dict[Family, tuple[type[Any], type[Any]]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}

SPECIAL = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|unknown|>")
VOCAB = 101  # odd, so that no number of ranks divides it
PAD_ID, END_ID = 0, 1
FIRST_WORD_ID = len(SPECIAL)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|{{ message.role }}|> {{ message.content }} {% if message.role == 'assistant' %}<|end|> {% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each word: special tokens, then w0, w1, ..., split at spaces."""
    words = [*SPECIAL, *(f"w{i}" for i in range(VOCAB - len(SPECIAL)))]
    model = WordLevel({word: i for i, word in enumerate(words)}, unk_token="<|unknown|>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        unk_token="<|unknown|>",
        additional_special_tokens=list(SPECIAL[2:5]),
        chat_template=CHAT_TEMPLATE,
    )


def tiny_model(family: Family, *, tied: bool, seed: int = 0, **config: Any) -> PreTrainedModel:
    """Two layers of width 64, two query heads on one key head of 32; weights large enough for peaked predictions."""
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
        "initializer_range": 0.12,
        "pad_token_id": PAD_ID,
        "eos_token_id": END_ID,
        "bos_token_id": None,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config_class, model_class = CLASSES[family]
        experts = EXPERTS if family == "qwen3_moe" else {}
        model: PreTrainedModel = model_class(config_class(**(shape | experts | config)))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("norm.weight", "_proj.bias")):
                    parameter += 0.2 * torch.randn_like(parameter)
    return model.eval()


def save_tiny_model(
    folder: Path,
    family: Family = "qwen3",
    *,
    tied: bool = True,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    generation_config: bool = True,
    **config: Any,
) -> Path:
    """Write a tiny model with its tokenizer to `folder`, and return it. `config` overrides entries of config.json."""
    tiny_model(family, tied=tied, seed=seed, **config).to(dtype).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    if generation_config:
        GenerationConfig(
            eos_token_id=[END_ID], pad_token_id=PAD_ID, do_sample=True
        ).save_pretrained(folder)
    else:
        (folder / "generation_config.json").unlink(missing_ok=True)
    return folder
