"""Reference log-probs and entropies on shards: the gradient is that of plain models, whole, one sequence at a time."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from spiral_mega.packing.training_sequence import TrainingSequence
from tests.policy.cases import LORA, NO_CLIPPING
from tests.policy.reference import Tensors, load_model, make_adapters, make_sequences
from tests.policy.test_gradients import largest_difference
from tests.support.ranks import run_ranks
from tests.support.tiny_models import save_tiny_model

TEMPERATURE = 0.8


@dataclass(frozen=True, eq=False)
class Case:
    """`kl` as the configuration has it; `other`: the reference is another model than the start."""

    kl: dict[str, Any] | None = None
    entropy_bonus: float = 0.0
    lora: dict[str, Any] | None = None
    other: bool = False


CASES = {
    "loss, adapters off": Case({"coefficient": 0.3, "estimator": "k2"}, lora=LORA),
    "loss, another model": Case({"coefficient": 0.3, "estimator": "k3"}, other=True),
    "loss, another model than the adapters'": Case(
        {"coefficient": 0.3, "estimator": "k2"}, lora=LORA, other=True
    ),
    "reward, adapters off": Case(
        {"coefficient": 0.3, "estimator": "k1", "apply": "reward"}, lora=LORA
    ),
    "reward, another model": Case(
        {"coefficient": 0.3, "estimator": "k3", "apply": "reward"}, other=True
    ),
    "entropy": Case(entropy_bonus=0.4),
    "entropy and loss": Case({"coefficient": 0.3}, entropy_bonus=0.4, lora=LORA),
}


def distributions(
    model: torch.nn.Module, sequence: TrainingSequence
) -> torch.distributions.Categorical:
    tokens = torch.tensor([[*sequence.prompt_ids, *sequence.response_ids]])
    logits = model(input_ids=tokens, use_cache=False).logits[0, len(sequence.prompt_ids) - 1 : -1]
    return torch.distributions.Categorical(logits=logits / TEMPERATURE)


def plain_gradient(
    model: torch.nn.Module,
    reference: torch.nn.Module,
    case: Case,
    sequences: list[TrainingSequence],
) -> Tensors:
    """Each formula as it is written in a textbook, token by token."""
    total = torch.zeros(())
    for sequence in sequences:
        policy, response = distributions(model, sequence), torch.tensor(sequence.response_ids)
        with torch.no_grad():
            of_reference = distributions(reference, sequence).log_prob(response)
        logprobs = policy.log_prob(response)
        advantages = torch.full_like(logprobs, sequence.advantage)
        penalty = -case.entropy_bonus * policy.entropy()
        if case.kl is not None:
            log_ratio = logprobs - of_reference
            values = {
                "k1": log_ratio,
                "k2": 0.5 * log_ratio**2,
                "k3": torch.expm1(-log_ratio) + log_ratio,
            }
            k = case.kl["coefficient"] * values[case.kl.get("estimator", "k2")]
            if case.kl.get("apply") == "reward":
                advantages = advantages - torch.stack([k[t:].sum() for t in range(len(k))]).detach()
            else:
                penalty = penalty + k
        ratios = torch.exp(logprobs - torch.tensor(sequence.sampler_logprobs))
        total = total + sequence.weight * (penalty - ratios * advantages).sum()
    model.zero_grad(set_to_none=True)
    total.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model and another one of its family."""
    folder = tmp_path_factory.mktemp("regularizers")
    return save_tiny_model(folder / "one", tied=True), save_tiny_model(
        folder / "two", tied=False, seed=5
    )


@pytest.fixture(scope="module")
def sequences(folders: tuple[Path, Path]) -> list[TrainingSequence]:
    return make_sequences(folders[0], 9, seed=4)


@pytest.fixture(scope="module")
def found(folders: tuple[Path, Path], sequences: list[TrainingSequence]) -> dict[str, Any]:
    """Every case on two ranks, in one launch."""
    jobs = {}
    for name, case in CASES.items():
        kl = case.kl and case.kl | {"reference": str(folders[1]) if case.other else None}
        sections = {
            "model": {"lora": case.lora},
            "algorithm": {"kl": kl, "entropy_bonus": case.entropy_bonus},
            "optimizer": NO_CLIPPING,
            "rollout": {"sampling.temperature": TEMPERATURE},
        }
        adapters = make_adapters(folders[0], case.lora, seed=3) if case.lora else None
        arguments = {
            "model": folders[0],
            "sections": sections,
            "splits": {"all": (sequences, 60, 1)},
        }
        jobs[name] = "gradients", arguments | {"adapters": adapters}
    (first, second) = run_ranks(2, "tests.policy.workers:run_cases", jobs)
    assert all(first[name]["all"]["metrics"] == second[name]["all"]["metrics"] for name in CASES)
    return first


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_that_of_plain_models(
    found: dict[str, Any], folders: tuple[Path, Path], sequences: list[TrainingSequence], name: str
) -> None:
    case = CASES[name]
    adapters = make_adapters(folders[0], case.lora, seed=3) if case.lora else None
    model, reference = load_model(folders[0], case.lora, adapters), load_model(folders[case.other])
    expected = plain_gradient(model, reference, case, sequences)
    largest = max(float(g.abs().max()) for g in expected.values())
    without = plain_gradient(model, reference, Case(), sequences)
    assert largest_difference(expected, without) > 0.05 * largest, "the terms matter"
    assert largest_difference(found[name]["all"]["gradients"], expected) < 4e-6 * max(largest, 0.25)
    metrics = found[name]["all"]["metrics"]
    assert ("kl/reference" in metrics) == (case.kl is not None)
    if case.kl is not None:
        gaps = [
            distributions(model, s).log_prob(torch.tensor(s.response_ids))
            - distributions(reference, s).log_prob(torch.tensor(s.response_ids))
            for s in sequences
        ]
        k3 = torch.cat([torch.exp(-gap) - 1 + gap for gap in gaps]).mean()
        assert metrics["kl/reference"] == pytest.approx(float(k3.detach()), rel=1e-3)
