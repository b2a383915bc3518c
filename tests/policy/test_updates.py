"""Updates are those of torch's AdamW on the whole model, and a batch without a finite gradient changes nothing."""

import math
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from spiral_mega.packing.training_sequence import TrainingSequence
from tests.policy.cases import LORA, LR_FACTORS, OPTIMIZER, UPDATES, Lab
from tests.policy.reference import Tensors, load_adapters, load_model, train

WORLDS = (1, 2)


def expected_updates(
    folder: Path, adapters: Tensors | None, batches: Iterable[tuple[float, list[TrainingSequence]]]
) -> list[tuple[float, Tensors]]:
    """What the plain model makes of (lr factor, sequences)."""
    model = load_model(folder, LORA if adapters else None, adapters)
    lr = OPTIMIZER["lr"]
    settings = {
        "weight_decay": OPTIMIZER["weight_decay"],
        "eps": OPTIMIZER["eps"],
        "clip": OPTIMIZER["max_grad_norm"],
    }
    return list(train(model, [(lr * factor, batch) for factor, batch in batches], **settings))


def start_of_adapters(lab: Lab, name: str) -> Tensors | None:
    """The adapters before the first update: A as the policy's seed drew it, B zero."""
    return lab.results[1][0][f"updates: {name}"]["at_start"] if UPDATES[name][1] else None


def assert_close(found: Tensors, expected: Tensors, tolerance: float = 1e-6) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert float((found[name] - expected[name]).abs().max()) < tolerance, name


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("name", UPDATES)
def test_three_updates_are_those_of_adamw_on_the_whole_model(
    lab: Lab, name: str, world_size: int
) -> None:
    found = lab.results[world_size][0][f"updates: {name}"]
    folder, adapters = lab.model(UPDATES[name][0]), start_of_adapters(lab, name)
    expected = expected_updates(
        folder, adapters, zip(LR_FACTORS, lab.batches(UPDATES[name][0]), strict=False)
    )
    norms = [norm for norm, _ in expected]
    assert max(norms) > OPTIMIZER["max_grad_norm"]  # or clipping would not be tested
    assert [m["optim/grad_norm"] for m in found["metrics"]] == pytest.approx(norms, rel=1e-4)
    for weights, (_, expected_weights) in zip(found["after"], expected, strict=True):
        assert_close(weights, expected_weights)


@pytest.mark.parametrize("world_size", WORLDS)
def test_learning_rate_follows_warm_up_and_cosine(lab: Lab, world_size: int) -> None:
    rates = [m["optim/lr"] for m in lab.results[world_size][0]["updates: tied"]["metrics"]]
    assert rates == pytest.approx([OPTIMIZER["lr"] * factor for factor in LR_FACTORS[:3]])


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("name", UPDATES)
def test_tied_weights_stay_one_tensor_and_masters_float32(
    lab: Lab, name: str, world_size: int
) -> None:
    found = lab.results[world_size][0][f"updates: {name}"]
    assert found["dtypes"] == {torch.float32}
    assert found["head_tensors"] == (2 if "untied" in name else 1)
    if name == "tied":
        end = found["end"]
        assert torch.equal(end["lm_head.weight"], end["model.embed_tokens.weight"])
        assert "lm_head.weight" not in found["after"][-1]


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("name", UPDATES)
def test_a_batch_without_a_finite_gradient_changes_nothing(
    lab: Lab, name: str, world_size: int
) -> None:
    found = lab.results[world_size][0][f"poisoned: {name}"]
    assert [m["optim/skipped"] for m in found["metrics"]] == [0, 1, 0]
    assert not math.isfinite(found["metrics"][1]["optim/grad_norm"])
    assert found["optimizer_kept"] == [False, True, False]
    first, second, third = found["after"]
    assert all(torch.equal(second[key], first[key]) for key in first)
    folder, adapters = lab.model(UPDATES[name][0]), start_of_adapters(lab, name)
    batches = lab.batches(UPDATES[name][0])
    clean = [(LR_FACTORS[0], batches[0]), (LR_FACTORS[2], batches[2])]
    assert_close(third, expected_updates(folder, adapters, clean)[-1][1])


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("name", UPDATES)
def test_streamed_weights_are_those_of_the_model_file_at_the_start(
    lab: Lab, name: str, world_size: int
) -> None:
    folder = lab.model(UPDATES[name][0])
    expected = load_file(folder / "model.safetensors")
    expected.setdefault("lm_head.weight", expected["model.embed_tokens.weight"])
    for rank in lab.results[world_size]:
        start = rank[f"updates: {name}"]["start"]
        assert start.keys() == expected.keys()
        assert all(torch.equal(start[key], expected[key]) for key in expected)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("name", ["tied", "untied"])
def test_streamed_weights_are_those_trained(lab: Lab, name: str, world_size: int) -> None:
    found = lab.results[world_size][0][f"updates: {name}"]
    trained = dict(found["after"][-1])
    trained.setdefault("lm_head.weight", trained["model.embed_tokens.weight"])
    assert found["end"].keys() == trained.keys()
    assert all(torch.equal(found["end"][key], trained[key]) for key in trained)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("name", ["LoRA, tied", "LoRA, untied"])
def test_streamed_weights_are_those_that_peft_merges(lab: Lab, name: str, world_size: int) -> None:
    folder = lab.model(UPDATES[name][0])
    found = lab.results[world_size][0][f"updates: {name}"]
    adapted = load_model(folder, LORA)
    head = adapted.get_base_model().lm_head.base_layer
    head.weight = torch.nn.Parameter(
        head.weight.detach().clone()
    )  # peft would merge a tied head into the embedding
    load_adapters(adapted, found["after"][-1])
    merged = dict(adapted.merge_and_unload().named_parameters())
    assert_close(found["end"], {key: value.detach() for key, value in merged.items()})
    moved = {key for key in merged if (found["end"][key] - found["start"][key]).abs().max() > 1e-4}
    adapted_layers = [*(f"{target}.weight" for target in LORA["targets"])]
    assert moved == {key for key in merged if key.endswith(tuple(adapted_layers))}
