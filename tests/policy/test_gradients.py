"""The policy's gradient is that of the plain model, whatever the ranks, the split and the owners."""

import math

import pytest
import torch

from spiral_mega.packing.tree import build_tree
from tests.policy.cases import BF16, GRADIENTS, LOGPROBS, SPLITS, Lab
from tests.policy.reference import gradients_of, token_logprobs

WORLDS = (1, 2, 4)


def largest_difference(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradient_is_that_of_the_plain_model_on_any_ranks_split_and_owners(
    lab: Lab, name: str
) -> None:
    case = GRADIENTS[name]
    plain = lab.plain(case)
    loss, expected = gradients_of(plain, lab.sequences(case), case.temperature)
    assert max(float(g.abs().max()) for g in expected.values()) > 0.2  # or 1e-6 would prove little
    for world_size in WORLDS:
        for split in SPLITS:
            found = lab.results[world_size][0][f"gradients: {name}"][split]
            assert largest_difference(found["gradients"], expected) < 1e-6, (world_size, split)
            assert found["metrics"]["train/loss"] == pytest.approx(loss, abs=1e-5)


@pytest.mark.parametrize("name", GRADIENTS)
def test_ranks_without_a_sequence_keep_step_and_add_nothing(lab: Lab, name: str) -> None:
    case = GRADIENTS[name]
    plain = lab.plain(case)
    _, expected = gradients_of(plain, lab.sequences(case)[:1], case.temperature)
    for world_size in WORLDS:
        found = lab.results[world_size][0][f"gradients: {name}"]["fewer than ranks"]
        assert largest_difference(found["gradients"], expected) < 1e-6
        assert found["metrics"]["train/tokens"] == 1


@pytest.mark.parametrize("name", GRADIENTS)
def test_tokens_without_a_sampler_logprob_are_counted_and_left_out(lab: Lab, name: str) -> None:
    case = GRADIENTS[name]
    plain = lab.plain(case)
    loss, expected = gradients_of(plain, lab.with_holes(case), case.temperature)
    holes = sum(
        math.isnan(p) for sequence in lab.with_holes(case) for p in sequence.sampler_logprobs
    )
    assert holes > 10
    for world_size in WORLDS:
        found = lab.results[world_size][0][f"gradients: {name}"]["holes"]
        assert found["metrics"]["sampler/masked_tokens"] == holes
        assert found["metrics"]["train/loss"] == pytest.approx(loss, abs=1e-5)
        assert largest_difference(found["gradients"], expected) < 1e-6


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("name", LOGPROBS)
def test_logprobs_without_gradient_are_those_of_the_plain_model(
    lab: Lab, name: str, world_size: int
) -> None:
    case = GRADIENTS[name]
    plain, (found, *others) = (
        lab.plain(case),
        [rank[f"logprobs: {name}"] for rank in lab.results[world_size]],
    )
    assert found.keys() == {s.key for s in lab.sequences(case)}
    assert not any(others)
    for sequence in lab.sequences(case):
        with torch.no_grad():
            expected = token_logprobs(plain, sequence, case.temperature)
        torch.testing.assert_close(found[sequence.key], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("world_size", WORLDS)
def test_micro_batches_were_few_or_many_as_the_budget_asked(lab: Lab, world_size: int) -> None:
    found = lab.results[world_size][0]["gradients: tied head"]
    tokens = build_tree(lab.sequences(GRADIENTS["tied head"])).num_tokens
    assert found["one budget for all"]["metrics"]["optim/microbatches"] == 1
    assert (
        found["many micro-batches"]["metrics"]["optim/microbatches"]
        >= tokens / (30 * world_size)
        > 1
    )


@pytest.mark.parametrize("world_size", WORLDS)
def test_metrics_are_the_same_on_every_rank(lab: Lab, world_size: int) -> None:
    for name in GRADIENTS:
        for split in SPLITS:
            every = [
                rank[f"gradients: {name}"][split]["metrics"] for rank in lab.results[world_size]
            ]
            assert all(metrics == every[0] for metrics in every)


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradient_norm_is_that_of_the_whole_gradient(lab: Lab, name: str) -> None:
    case = GRADIENTS[name]
    plain = lab.plain(case)
    _, expected = gradients_of(plain, lab.sequences(case), case.temperature)
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in expected.values()))
    for world_size in WORLDS:
        found = lab.results[world_size][0][f"gradients: {name}"]["many micro-batches"]
        assert found["metrics"]["optim/grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_entropy_and_ratio_metrics_are_those_of_the_plain_model(lab: Lab) -> None:
    case = GRADIENTS["tied head"]
    plain = lab.plain(case)
    entropies, log_ratios = [], []
    for sequence in lab.sequences(case):
        with torch.no_grad():
            logits = plain(
                input_ids=torch.tensor([[*sequence.prompt_ids, *sequence.response_ids]])
            ).logits[0]
        rows = logits[len(sequence.prompt_ids) - 1 : -1]
        entropies += torch.distributions.Categorical(logits=rows).entropy().tolist()
        taken = torch.distributions.Categorical(logits=rows).log_prob(
            torch.tensor(sequence.response_ids)
        )
        log_ratios += (taken - torch.tensor(sequence.sampler_logprobs)).tolist()
    for world_size in WORLDS:
        metrics = lab.results[world_size][0]["gradients: tied head"]["many micro-batches"][
            "metrics"
        ]
        assert metrics["train/tokens"] == len(entropies)
        assert metrics["entropy/trained"] == pytest.approx(
            sum(entropies) / len(entropies), abs=1e-5
        )
        assert metrics["sampler/log_ratio_mean"] == pytest.approx(
            sum(log_ratios) / len(log_ratios), abs=1e-5
        )
        kl = sum(math.exp(ratio) - 1 - ratio for ratio in log_ratios) / len(log_ratios)
        assert metrics["sampler/kl"] == pytest.approx(kl, rel=1e-3, abs=1e-6)
        assert metrics["sampler/log_ratio_abs_max"] == pytest.approx(
            max(map(abs, log_ratios)), abs=1e-5
        )


@pytest.mark.parametrize("world_size", WORLDS)
def test_bf16_computes_close_to_float32_and_keeps_float32_masters(
    lab: Lab, world_size: int
) -> None:
    loss, expected = gradients_of(lab.plain(BF16), lab.sequences(BF16))
    results = lab.results[world_size][0]["gradients: bf16"]
    assert results["dtypes"] == {torch.float32}
    found = results["many micro-batches"]
    difference = torch.cat(
        [(found["gradients"][name] - g).flatten() for name, g in expected.items()]
    )
    relative = float(difference.norm() / torch.cat([g.flatten() for g in expected.values()]).norm())
    _, plain = gradients_of(lab.plain(BF16).bfloat16(), lab.sequences(BF16))
    rounding = torch.cat([(plain[name].float() - g).flatten() for name, g in expected.items()])
    assert relative > 1e-4  # or it was not bf16 that computed
    assert float(difference.norm()) <= float(
        rounding.norm()
    )  # no worse than transformers alone, wholly in bf16
    assert found["metrics"]["train/loss"] == pytest.approx(loss, abs=0.02)
    assert {g.dtype for g in found["gradients"].values()} == {torch.float32}
