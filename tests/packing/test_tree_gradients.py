"""Whole models on token trees: losses, gradients and log-probs are those of plain transformers on each sequence."""

from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
)

from spiral_mega.packing.attention import check_model
from spiral_mega.packing.training_sequence import TrainingSequence
from spiral_mega.packing.tree_batch import pack
from spiral_mega.packing.tree_parts import cut_tree, make_branches
from tests.packing.random_trees import make, sequence_lists

VOCAB = 13
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
ONE_OF_EACH = ["sliding_attention", "full_attention"]
MODELS: dict[str, PreTrainedConfig] = {
    "qwen3": Qwen3Config(**SHAPE),
    "llama": LlamaConfig(**SHAPE),
    "qwen3-moe": Qwen3MoeConfig(
        **SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12
    ),
    "gemma3, window of 4": Gemma3TextConfig(**SHAPE, sliding_window=4, layer_types=ONE_OF_EACH),
    "gemma2, window of 4, soft caps": Gemma2Config(
        **SHAPE,
        sliding_window=4,
        layer_types=ONE_OF_EACH,
        attn_logit_softcapping=1.5,
        final_logit_softcapping=None,
    ),
    "gpt-oss, sinks": GptOssConfig(
        **SHAPE,
        sliding_window=4,
        layer_types=ONE_OF_EACH,
        num_local_experts=2,
        num_experts_per_tok=1,
    ),
}
# Without shrinking: a failure is reported in seconds, by a longer example.
SEARCH: dict[str, Any] = {"deadline": None, "phases": (Phase.explicit, Phase.reuse, Phase.generate)}
Gradients = dict[str, torch.Tensor]


class StayInDouble(TorchFunctionMode):
    """Keep float64 tensors in float64, where transformers casts norms, softmax and routing to float32."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if function is torch.Tensor.float:
                return args[0]
            args = tuple(torch.float64 if each is torch.float32 else each for each in args)
            kwargs = {
                k: torch.float64 if each is torch.float32 else each for k, each in kwargs.items()
            }
        return function(*args, **kwargs)


def model_of(name: str, attention: str, dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        MODELS[name], dtype=torch.float32, attn_implementation=attention
    )
    if hasattr(MODELS[name], "num_experts_per_tok"):
        model.set_experts_implementation("eager")  # the others have no float64
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 0.5, 0.3)
    return model.to(dtype).eval()


def alone(model: Any, sequence: TrainingSequence) -> torch.Tensor:
    """Return log-probs of the response tokens from the model's own forward on this sequence only."""
    tokens = torch.tensor([[*sequence.prompt_ids, *sequence.response_ids]])
    with StayInDouble():
        logprobs = model(input_ids=tokens, use_cache=False).logits[0].log_softmax(-1)
    first = len(sequence.prompt_ids)
    return torch.stack(
        [logprobs[first + i - 1, t] for i, t in enumerate(sequence.response_ids)]
        or [logprobs.new_zeros(())]
    )[: len(sequence.response_ids)]


def merged(model: Any, sequences: list[TrainingSequence]) -> torch.Tensor:
    """Return log-probs of all response tokens, sequence by sequence, from one pass over the tree."""
    batch = pack(sequences)
    with StayInDouble():
        hidden = model.base_model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            **batch.attention_kwargs(),
        ).last_hidden_state[0, batch.logit_indices]
    logprobs = model.get_output_embeddings()(hidden).log_softmax(-1)
    return logprobs.gather(1, batch.labels[:, None])[batch.gather_indices, 0]


def loss(logprobs: torch.Tensor, sequence: TrainingSequence) -> torch.Tensor:
    ratio = torch.exp(logprobs - torch.tensor(sequence.sampler_logprobs, dtype=logprobs.dtype))
    return -(sequence.weight * sequence.advantage * ratio).sum()


def loss_of_tree(model: Any, sequences: list[TrainingSequence]) -> torch.Tensor:
    parts = merged(model, sequences).split([len(s.response_ids) for s in sequences])
    return torch.stack([loss(part, s) for part, s in zip(parts, sequences, strict=True)]).sum()


def gradients(model: torch.nn.Module, total: torch.Tensor) -> Gradients:
    model.zero_grad(set_to_none=True)
    if total.requires_grad:
        total.backward()
    return {
        n: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for n, p in model.named_parameters()
    }


def expected_of(name: str, sequences: list[TrainingSequence]) -> tuple[torch.Tensor, Gradients]:
    model = model_of(name, "eager")
    total = torch.stack([loss(alone(model, s), s) for s in sequences]).sum()
    return total.detach(), gradients(model, total)


def assert_same(found: Gradients, expected: Gradients, tolerance: float) -> None:
    """Compare gradients relative to each one's largest entry, or to a thousandth of the largest of all if higher."""
    scale = max(float(g.abs().max()) for g in expected.values())
    for parameter, gradient in expected.items():
        size = max(float(gradient.abs().max()), 1e-3 * scale, 1e-30)
        assert float((found[parameter].double() - gradient).abs().max()) <= tolerance * size, (
            parameter
        )


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=6, **SEARCH)
@given(sequence_lists(vocab=3))
def test_loss_and_gradient_are_those_of_separate_sequences(
    name: str, sequences: list[TrainingSequence]
) -> None:
    total, expected = expected_of(name, sequences)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 2e-5)):
        model = model_of(name, "tree_torch", dtype)
        found = loss_of_tree(model, sequences)
        assert found.item() == pytest.approx(float(total), rel=tolerance, abs=tolerance)
        assert_same(gradients(model, found), expected, tolerance)


@settings(max_examples=15, **SEARCH)
@given(sequence_lists(vocab=3, most=6), st.integers(0, 12))
def test_the_gradient_is_the_same_wherever_the_tree_is_cut(
    sequences: list[TrainingSequence], spare: int
) -> None:
    sequences = [s for s in sequences if s.key.prompt_index == sequences[0].key.prompt_index]
    total, expected = expected_of("qwen3", sequences)
    by_key = {s.key: s for s in sequences}
    model = model_of("qwen3", "tree_torch")
    parts = cut_tree(make_branches(sequences), max(s.num_tokens for s in sequences) + spare)
    found = torch.stack(
        [loss_of_tree(model, [by_key[key] for key in part.keys]) for part in parts]
    ).sum()
    assert found.item() == pytest.approx(float(total), rel=1e-10, abs=1e-10)
    assert_same(gradients(model, found), expected, 1e-10)


@pytest.mark.parametrize("name", MODELS)
def test_a_token_changed_in_one_branch_changes_no_logprob_of_another(name: str) -> None:
    model = model_of(name, "tree_torch")
    prompt, branches = [1, 2, 3, 4, 5], [[6, 7, 8, 9], [6, 7, 9, 9], [10, 7], [11, 11, 11]]

    def logprobs(responses: list[list[int]]) -> list[torch.Tensor]:
        with torch.no_grad():
            return list(
                merged(model, [make(0, i, prompt, r) for i, r in enumerate(responses)]).split(
                    [4, 4, 2, 3]
                )
            )

    clean = logprobs(branches)
    for branch, response in enumerate(branches):
        for place in range(len(response)):
            changed = [list(each) for each in branches]
            changed[branch][place] = 12
            found = logprobs(changed)
            for other in range(4):
                if other != branch:
                    # Another layout adds the same numbers in another order: equal to rounding, where a leak is not.
                    torch.testing.assert_close(found[other], clean[other], rtol=0, atol=1e-12)
            assert not torch.allclose(
                found[branch][place:], clean[branch][place:], rtol=0, atol=1e-6
            )


def test_models_that_mix_tokens_outside_their_attention_are_refused() -> None:
    with torch.device("meta"):
        hybrid = AutoModelForCausalLM.from_config(
            Qwen3NextConfig(**SHAPE, num_experts=2, num_experts_per_tok=1)
        )
        recurrent = AutoModelForCausalLM.from_config(
            RecurrentGemmaConfig(**SHAPE | {"num_hidden_layers": 3})
        )
    with pytest.raises(ValueError, match=r"Qwen3Next.* has layers of type linear_attention"):
        check_model(hybrid)
    with pytest.raises(ValueError, match=r"RecurrentGemma.*token trees cannot follow"):
        check_model(recurrent)
    for name in MODELS:
        check_model(model_of(name, "tree_torch"))
