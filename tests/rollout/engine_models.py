"""Tiny real models for the engine, and what plain transformers says of the engine's samples."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, GPT2Config, GPT2LMHeadModel

from spiral_mega.rollout.engine import Request, RequestKey, Sample
from spiral_mega.rollout.transformers_engine import TransformersEngine
from spiral_mega.traces import SEARCH
from tests.support.tiny_models import END_ID, VOCAB, tiny_model

GPT2_POSITIONS = 24
WINDOWS: dict[str, Any] = {
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
}


def build(family: str, seed: int = 0) -> Any:
    """A random tiny model; the same seed gives the same weights."""
    torch.manual_seed(seed)
    if family == "qwen3-windows":
        return tiny_model("qwen3", tied=False, seed=seed, use_sliding_window=True, **WINDOWS)
    if family == "qwen3-groups":
        return tiny_model(
            "qwen3", tied=False, seed=seed, num_attention_heads=6, num_key_value_heads=2
        )
    if family == "gemma3-windows":
        config = tiny_model("qwen3", tied=False).config
        names = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
        )
        names += (
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
            "initializer_range",
            "eos_token_id",
        )
        shape = {name: getattr(config, name) for name in names}
        return Gemma3ForCausalLM(
            Gemma3TextConfig(**shape, query_pre_attn_scalar=32, **WINDOWS)
        ).eval()
    if family == "gpt2":
        shape = {
            "vocab_size": VOCAB,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 2,
            "n_positions": GPT2_POSITIONS,
        }
        return GPT2LMHeadModel(
            GPT2Config(**shape, initializer_range=0.2, eos_token_id=END_ID)
        ).eval()
    return tiny_model(family, tied=False, seed=seed)


def engine_of(
    model: Any, *, temperature: float = 1.0, stop: Sequence[int] = (END_ID,), max_num_seqs: int = 64
):
    return TransformersEngine(
        copy.deepcopy(model), temperature=temperature, stop_ids=stop, max_num_seqs=max_num_seqs
    )


def request(
    key: Any, prompt: Sequence[int], *, samples: int = 1, seed: int = 0, tokens: int = 12
) -> Request:
    """`key` stands in the place of the episode."""
    return Request(RequestKey(key, SEARCH), list(prompt), samples, seed, tokens)


def drain(engine: TransformersEngine) -> dict[tuple[Any, int], Sample]:
    """Every sample, by (key, index); none comes twice."""
    samples: dict[tuple[Any, int], Sample] = {}
    while engine.has_unfinished():
        for sample in engine.step():
            assert (sample.key.episode, sample.index) not in samples
            samples[sample.key.episode, sample.index] = sample
    return samples


def generate(
    engine: TransformersEngine, requests: Sequence[Request]
) -> dict[tuple[Any, int], Sample]:
    for each in requests:
        engine.add(each)
    return drain(engine)


@torch.no_grad()
def teacher_forced(
    model: Any, prompt: Sequence[int], response: Sequence[int], temperature: float
) -> torch.Tensor:
    """Log-probs [L] of `response` after `prompt`: one sequence, no padding, no cache."""
    logits = model(torch.tensor([[*prompt, *response]]), use_cache=False).logits[0].float()
    logprobs = torch.log_softmax(logits / temperature, dim=-1)[len(prompt) - 1 : -1]
    return logprobs.gather(1, torch.tensor(response)[:, None])[:, 0]


@torch.no_grad()
def next_token_probabilities(
    model: Any, prompt: Sequence[int], temperature: float = 1.0
) -> torch.Tensor:
    return torch.softmax(
        model(torch.tensor([list(prompt)])).logits[0, -1].double() / temperature, dim=-1
    )


def chi_square_p(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """P-value of the counts under the expected ones; cells that expect fewer than 5 are put together."""
    counts, expected = counts.double(), expected.double()
    small = expected < 5
    cells = torch.cat([counts[~small], counts[small].sum()[None]])
    means = torch.cat([expected[~small], expected[small].sum()[None]])
    cells, means = cells[means > 0], means[means > 0]
    statistic = ((cells - means) ** 2 / means).sum()
    return float(
        torch.special.gammaincc(torch.tensor((len(cells) - 1) / 2).double(), statistic / 2)
    )


def ragged_prompts(count: int, longest: int = 17, seed: int = 5) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(2, VOCAB, (length,), generator=generator).tolist() for length in lengths]
