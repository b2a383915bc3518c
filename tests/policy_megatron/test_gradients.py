"""The gradient on megatron-core is that of the plain model, whatever the layout, the split and the owners."""

import math

import pytest
import torch
from safetensors.torch import load_file

from spiral_mega.packing.tree import build_tree
from tests.policy.reference import Tensors, gradients_of, load_model, token_logprobs
from tests.policy_megatron.cases import BF16, GRADIENTS, SPLITS, Lab
from tests.policy_megatron.expected import by_checkpoint_name

pytestmark = pytest.mark.megatron

WHOLE = (*SPLITS, "without trees")


def largest_difference(first: Tensors, second: Tensors) -> float:
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def expected(lab: Lab, name: str, count: int | None = None) -> tuple[float, Tensors]:
    model = GRADIENTS[name][1]
    loss, gradients = gradients_of(load_model(lab.model(model)), lab.sequences(model)[:count])
    return loss, by_checkpoint_name(gradients)


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradient_is_that_of_the_plain_model_in_any_layout(lab: Lab, name: str) -> None:
    loss, gradients = expected(lab, name)
    assert max(float(g.abs().max()) for g in gradients.values()) > 0.2  # or 1e-6 would prove little
    for rank in lab.of("gradients", name):
        for split in WHOLE:
            assert largest_difference(rank[split]["gradients"], gradients) < 1e-6, split
            assert rank[split]["metrics"]["train/loss"] == pytest.approx(loss, abs=1e-5)


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradient_norm_counts_every_weight_once(lab: Lab, name: str) -> None:
    """Shards, copies of norms on every rank, and a tied head's second copy on the last stage included."""
    _, gradients = expected(lab, name)
    if "tied" in GRADIENTS[name][1]:
        del gradients["lm_head.weight"]
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
    for split in WHOLE:
        found = lab.of("gradients", name)[0][split]["metrics"]["optim/grad_norm"]
        assert found == pytest.approx(norm, rel=1e-6), split


@pytest.mark.parametrize("name", GRADIENTS)
def test_logprobs_are_those_of_the_plain_model_for_each_ranks_own_sequences(
    lab: Lab, name: str
) -> None:
    ranks, model, _ = GRADIENTS[name]
    plain = load_model(lab.model(model))
    for rank, results in enumerate(lab.of("gradients", name)):
        with torch.no_grad():
            own = torch.cat(
                [token_logprobs(plain, s, 1.0) for s in lab.sequences(model)[rank::ranks]]
            )
        for split in WHOLE:
            assert float((results[split]["logprobs"] - own).abs().max()) < 5e-6


@pytest.mark.parametrize("name", GRADIENTS)
def test_replicas_without_a_sequence_keep_step_and_add_nothing(lab: Lab, name: str) -> None:
    _, gradients = expected(lab, name, 1)
    for rank in lab.of("gradients", name):
        assert largest_difference(rank["fewer than ranks"]["gradients"], gradients) < 1e-6
        assert rank["fewer than ranks"]["metrics"]["train/tokens"] == 1


@pytest.mark.parametrize("name", GRADIENTS)
def test_weights_come_out_of_the_shards_as_they_went_in_to_the_bit(lab: Lab, name: str) -> None:
    saved = load_file(lab.model(GRADIENTS[name][1]) / "model.safetensors")
    saved.setdefault("lm_head.weight", saved["model.embed_tokens.weight"])
    for rank in lab.of("gradients", name):
        assert rank["weights"].keys() == saved.keys()
        assert all(torch.equal(rank["weights"][key], saved[key]) for key in saved)


@pytest.mark.parametrize("name", GRADIENTS)
def test_metrics_are_the_same_on_every_rank_and_count_every_token_once(lab: Lab, name: str) -> None:
    sequences = lab.sequences(GRADIENTS[name][1])
    tokens = build_tree(sequences).num_tokens
    for split in WHOLE:
        every = [rank[split]["metrics"] for rank in lab.of("gradients", name)]
        assert all(metrics == every[0] for metrics in every)
        assert every[0]["train/tokens"] == sum(len(s.response_ids) for s in sequences)
    ranks, _, layout = GRADIENTS[name]
    replicas = ranks // math.prod(
        layout.get(f"{kind}_parallel", 1) for kind in ("tensor", "context", "pipeline")
    )
    found = lab.of("gradients", name)[0]["many micro-batches"]["metrics"]["optim/microbatches"]
    assert found >= tokens / (30 * replicas) > 1


def test_bf16_computes_close_to_float32_and_sums_in_float32(lab: Lab) -> None:
    model, sequences = lab.model(BF16[1]), lab.sequences(BF16[1])
    loss, gradients = gradients_of(load_model(model), sequences)
    _, rounded = gradients_of(load_model(model).bfloat16(), sequences)
    gradients, rounded = by_checkpoint_name(gradients), by_checkpoint_name(rounded)
    for rank in lab.results[BF16[0]]:
        found = rank["gradients: bf16"]["many micro-batches"]
        ours = torch.cat(
            [(found["gradients"][name] - g).flatten() for name, g in gradients.items()]
        )
        theirs = torch.cat([(rounded[name].float() - g).flatten() for name, g in gradients.items()])
        assert float(ours.norm()) > 1e-4  # or it was not bf16 that computed
        assert float(ours.norm()) <= 1.2 * float(
            theirs.norm()
        )  # about what transformers alone, wholly in bf16, is off
        assert found["metrics"]["train/loss"] == pytest.approx(loss, abs=0.05)
        assert {tensor.dtype for tensor in rank["gradients: bf16"]["weights"].values()} == {
            torch.bfloat16
        }
