"""Two models, as adapters on one base or each on its own, are trained as if each were alone (paper, appendix B)."""

from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.policy.cases import LORA, OPTIMIZER, STEPS
from tests.policy.reference import gradients_of, load_model, make_adapters, make_sequences, train
from tests.policy.test_gradients import largest_difference
from tests.policy.test_updates import assert_close
from tests.support.ranks import run_ranks
from tests.support.tiny_models import save_tiny_model

MODELS = ("search", "aggregation")
OPTIMIZERS = {"search": OPTIMIZER, "aggregation": OPTIMIZER | {"lr": 5e-3, "max_grad_norm": 0.2}}
LR_FACTORS = (0.5, 1.0, 0.75)  # see cases.py
FORMS = ("adapters", "models")
FROZEN = [(form, frozen) for form in FORMS for frozen in MODELS]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("two")
    model = save_tiny_model(folder / "model", tied=True)
    batches = {
        name: [make_sequences(model, 9, seed=10 * i + j) for j in range(3)]
        for i, name in enumerate(MODELS, 1)
    }
    together = make_sequences(model, 12, seed=1)
    sequences = {"search": together[::2], "aggregation": together[1::2]}
    adapters = make_adapters(model, LORA, seed=3)
    argument = {
        "folder": model,
        "exports": folder / "exports",
        "batches": batches,
        "sequences": sequences,
        "adapters": adapters,
        "sections": {
            "run": {"steps": STEPS},
            "optimizer": OPTIMIZERS["search"],
            "two_models": {"aggregation_optimizer": OPTIMIZERS["aggregation"]},
        },
    }
    return argument | {"found": run_ranks(2, "tests.policy.two_models_jobs:lab", argument)[0]}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model", MODELS)
def test_each_model_is_trained_as_a_plain_one_on_its_own_rows_by_its_own_optimizer(
    trained: dict[str, Any], form: str, model: str
) -> None:
    found, settings = trained["found"][f"{form}, None frozen"], OPTIMIZERS[model]
    lora = LORA if form == "adapters" else None
    plain = load_model(trained["folder"], lora, found["start"][model] if lora else None)
    batches = [
        (settings["lr"] * f, batch)
        for f, batch in zip(LR_FACTORS, trained["batches"][model], strict=True)
    ]
    kinds = {
        "weight_decay": settings["weight_decay"],
        "eps": settings["eps"],
        "clip": settings["max_grad_norm"],
    }
    expected = list(train(plain, batches, **kinds))
    metrics = found["metrics"][model]
    assert [m["optim/grad_norm"] for m in metrics] == pytest.approx(
        [norm for norm, _ in expected], rel=1e-4
    )
    assert max(norm for norm, _ in expected) > settings["max_grad_norm"]
    for weights, (_, expected_weights) in zip(found["after"][model], expected, strict=True):
        assert_close(weights, expected_weights)


@pytest.mark.parametrize("frozen", [None, *MODELS])
@pytest.mark.parametrize("form", FORMS)
def test_an_update_of_one_model_leaves_the_other_and_the_base_as_they_were_to_the_bit(
    trained: dict[str, Any], form: str, frozen: str | None
) -> None:
    kept = trained["found"][f"{form}, {frozen} frozen"]["kept"]
    assert kept == [True] * (3 if frozen else 6)


@pytest.mark.parametrize(("form", "frozen"), FROZEN)
def test_a_frozen_model_has_no_gradient_and_no_moments_and_does_not_change(
    trained: dict[str, Any], form: str, frozen: str
) -> None:
    found = trained["found"][f"{form}, {frozen} frozen"]
    (name,), (held,) = found["frozen"].keys(), found["frozen"].values()
    assert name == frozen
    assert (held["trained"], held["gradients"], held["moments"]) == (False, False, 0)
    assert all(torch.equal(held["end"][key], each) for key, each in found["start"][frozen].items())
    (other,) = found["after"]
    free = trained["found"][f"{form}, None frozen"]["after"][other]
    assert all(
        torch.equal(a[key], b[key])
        for a, b in zip(found["after"][other], free, strict=True)
        for key in b
    )


def test_two_equal_adapters_get_the_parts_of_what_one_gets(trained: dict[str, Any]) -> None:
    found = trained["found"]["gradients"]
    scale = max(float(gradient.abs().max()) for gradient in found["one"].values())
    together = {
        name: found["search"][name] + found["aggregation"][name] for name in found["search"]
    }
    assert largest_difference(together, found["one"]) < 4e-6 * scale
    for model in MODELS:
        plain = load_model(trained["folder"], LORA, trained["adapters"])
        _, expected = gradients_of(plain, trained["sequences"][model])
        assert largest_difference(found[model], expected) < 4e-6 * scale


def test_a_checkpoint_of_an_adapter_holds_nothing_of_the_other(trained: dict[str, Any]) -> None:
    saved = trained["found"]["adapters, None frozen"]["saved"]
    for model in MODELS:
        assert saved[model]
        assert all(name.endswith(f".{model}.weight") and ".lora_" in name for name in saved[model])


@pytest.mark.parametrize("model", MODELS)
def test_exports_are_what_peft_and_transformers_read_back(
    trained: dict[str, Any], model: str
) -> None:
    own = AutoModelForCausalLM.from_pretrained(trained["exports"] / "models" / model)
    weights = trained["found"]["models, None frozen"]["after"][model][-1]
    assert all(torch.equal(own.get_parameter(name), weights[name]) for name in weights)
    base = AutoModelForCausalLM.from_pretrained(trained["folder"])
    adapted = PeftModel.from_pretrained(base, trained["exports"] / "adapters" / model)
    weights = trained["found"]["adapters, None frozen"]["after"][model][-1]
    read = {name: each for name, each in adapted.named_parameters() if ".lora_" in name}
    assert read.keys() == weights.keys()
    assert all(torch.equal(read[name], weights[name]) for name in weights)
    assert adapted.peft_config["default"].lora_alpha == LORA["alpha"]
