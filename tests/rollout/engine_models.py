"""Tiny real models for the engine, and what plain transformers says of the engine's samples."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers import Qwen3Config, Qwen3ForCausalLM

from spiral_mega.rollout.engine import Request, Sample
from spiral_mega.rollout.transformers_engine import TransformersEngine

VOCABULARY = 37
STOP = 0

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    # wide enough that every logit depends visibly on the whole context
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": STOP,
    "eos_token_id": STOP,
    "bos_token_id": None,
}


def build(family: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A random tiny model; the same seed gives the same weights."""
    torch.manual_seed(seed)
    window: dict[str, Any] = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    gpt2 = GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=24, initializer_range=0.2,
        bos_token_id=None, eos_token_id=STOP,
    )  # fmt: skip
    model = {
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE)),
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
        "qwen3-window": lambda: Qwen3ForCausalLM(
            Qwen3Config(**SHAPE, use_sliding_window=True, max_window_layers=0, **window)
        ),
        "gemma3-window": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE, query_pre_attn_scalar=8, **window)),
        "gpt2": lambda: GPT2LMHeadModel(gpt2),
    }[family]()
    return model.to(dtype).eval()


def engine_of(model: Any, *, temperature: float = 1.0, stop: Sequence[int] = (STOP,), max_batch: int = 64):
    return TransformersEngine(copy.deepcopy(model), temperature=temperature, stop_ids=stop, max_batch=max_batch)


def request(key: Any, prompt: Sequence[int], *, samples: int = 1, seed: int = 0, tokens: int = 12) -> Request:
    return Request((key,), list(prompt), samples, seed, tokens)


def drain(engine: TransformersEngine) -> dict[tuple[Any, int], Sample]:
    """Every sample, by (key, index); none comes twice."""
    samples: dict[tuple[Any, int], Sample] = {}
    while engine.has_unfinished():
        for sample in engine.step():
            assert (sample.key[0], sample.index) not in samples
            samples[sample.key[0], sample.index] = sample
    return samples


def generate(engine: TransformersEngine, requests: Sequence[Request]) -> dict[tuple[Any, int], Sample]:
    for each in requests:
        engine.add(each)
    return drain(engine)


@torch.no_grad()
def teacher_forced(model: Any, prompt: Sequence[int], response: Sequence[int], temperature: float) -> torch.Tensor:
    """Log-probs [L] of `response` after `prompt`: one sequence, no padding, no cache."""
    logits = model(torch.tensor([[*prompt, *response]]), use_cache=False).logits[0].float()
    logprobs = torch.log_softmax(logits / temperature, dim=-1)[len(prompt) - 1 : -1]
    return logprobs.gather(1, torch.tensor(response)[:, None])[:, 0]


@torch.no_grad()
def next_token_probabilities(model: Any, prompt: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    return torch.softmax(model(torch.tensor([list(prompt)])).logits[0, -1].double() / temperature, dim=-1)


def chi_square_p(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """P-value of the counts under the expected ones; cells that expect fewer than 5 are put together."""
    counts, expected = counts.double(), expected.double()
    small = expected < 5
    cells = torch.cat([counts[~small], counts[small].sum()[None]])
    means = torch.cat([expected[~small], expected[small].sum()[None]])
    cells, means = cells[means > 0], means[means > 0]
    statistic = ((cells - means) ** 2 / means).sum()
    return float(torch.special.gammaincc(torch.tensor((len(cells) - 1) / 2).double(), statistic / 2))


def ragged_prompts(count: int, longest: int = 17, seed: int = 5) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(1, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
