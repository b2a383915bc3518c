"""Adapters on parallel linears are peft's on the whole model: log-probs, gradients, start, updates, exports."""

import math
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.policy.reference import Tensors, gradients_of, load_model, token_logprobs
from tests.policy_megatron.cases import BF16, LORA, LORA_UPDATES, SPLITS, Lab
from tests.policy_megatron.test_gradients import largest_difference

pytestmark = pytest.mark.megatron


def by_file_name(tensors: Tensors) -> Tensors:
    return {name.replace(".default.weight", ".weight"): tensor for name, tensor in tensors.items()}


def of(lab: Lab, kind: str, name: str, cases: Any) -> list[dict[str, Any]]:
    return [rank[f"{kind}: {name}"] for rank in lab.results[cases[name][0]]]


def truth(lab: Lab, name: str) -> torch.nn.Module:
    """The plain model with peft's adapters; in float64, but for experts, which transformers does not multiply in it."""
    _, model, _, lora = LORA[name]
    plain = load_model(lab.model(model), lora, lab.adapters(name))
    return plain if model == "experts" else plain.double()


@pytest.mark.parametrize("name", LORA)
def test_the_adapters_gradient_and_its_norm_are_pefts(lab: Lab, name: str) -> None:
    plain = truth(lab, name)
    loss, gradients = gradients_of(plain, lab.adapted_sequences(name))
    gradients = by_file_name(gradients)
    assert max(float(g.abs().max()) for g in gradients.values()) > 0.2  # or 1e-6 would prove little
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
    for rank in of(lab, "LoRA", name, LORA):
        for split in SPLITS:
            assert largest_difference(rank[split]["gradients"], gradients) < 1e-6, split
            assert rank[split]["metrics"]["train/loss"] == pytest.approx(loss, abs=1e-5)
            assert rank[split]["metrics"]["optim/grad_norm"] == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("name", LORA)
def test_logprobs_are_pefts(lab: Lab, name: str) -> None:
    ranks, model, _, _ = LORA[name]
    plain, base = truth(lab, name), load_model(lab.model(model))
    for rank, results in enumerate(of(lab, "LoRA", name, LORA)):
        mine = lab.adapted_sequences(name)[rank::ranks]
        with torch.no_grad():
            own, without = (
                torch.cat([token_logprobs(each, s, 1.0) for s in mine]) for each in (plain, base)
            )
        assert float((own - without).abs().max()) > 0.1  # the adapters do something
        for split in SPLITS:
            assert float((results[split]["logprobs"] - own).abs().max()) < 5e-6


@pytest.mark.parametrize("name", LORA_UPDATES)
def test_start_and_three_updates_are_those_of_the_fsdp_policy(lab: Lab, name: str) -> None:
    for rank in of(lab, "LoRA updates", name, LORA_UPDATES):
        (our_start, *ours), (their_start, *theirs) = rank["ours"], rank["theirs"]
        assert our_start["adapter"].keys() == their_start["adapter"].keys()
        assert all(
            torch.equal(our_start["adapter"][key], t) for key, t in their_start["adapter"].items()
        )
        for mine, other in zip(ours, theirs, strict=True):
            assert largest_difference(mine["adapter"], other["adapter"]) < 1e-5
            assert mine["metrics"]["optim/grad_norm"] == pytest.approx(
                other["metrics"]["optim/grad_norm"], rel=1e-6
            )
        moved = largest_difference(ours[-1]["adapter"], our_start["adapter"])
        assert moved > 1e-3


def test_bf16_computes_with_adapters_that_stay_in_float32(lab: Lab) -> None:
    """As on FSDP2: both round the same products, so that what they learn points the same way."""
    for rank in lab.results[BF16[0]]:
        found = rank["LoRA updates: bf16"]
        start, ours, theirs = (
            torch.cat([tensor.flatten() for _, tensor in sorted(each["adapter"].items())])
            for each in (found["ours"][0], found["ours"][-1], found["theirs"][-1])
        )
        assert {tensor.dtype for tensor in found["ours"][-1]["adapter"].values()} == {torch.float32}
        assert {tensor.dtype for tensor in found["base"].values()} == {torch.bfloat16}
        assert float((ours - theirs).norm()) > 1e-4  # or it was not bf16 that computed
        assert float(torch.cosine_similarity(ours - start, theirs - start, dim=0)) > 0.95


@pytest.mark.parametrize("name", LORA_UPDATES)
def test_adapters_alone_are_saved_and_the_base_stays_as_it_was(lab: Lab, name: str) -> None:
    saved = load_file(lab.model(LORA_UPDATES[name][1]) / "model.safetensors")
    saved.setdefault("lm_head.weight", saved["model.embed_tokens.weight"])
    ranks = of(lab, "LoRA updates", name, LORA_UPDATES)
    assert set().union(*(rank["saved"] for rank in ranks)) == ranks[0]["ours"][-1]["adapter"].keys()
    for rank in ranks:
        assert rank["base"].keys() == saved.keys()
        assert all(torch.equal(rank["base"][key], saved[key]) for key in saved)


@pytest.mark.parametrize("name", LORA_UPDATES)
def test_the_adapter_loads_in_peft_and_the_merged_export_in_transformers(
    lab: Lab, name: str
) -> None:
    ranks, model, _, lora = LORA_UPDATES[name]
    results = of(lab, "LoRA updates", name, LORA_UPDATES)
    config = LoraConfig(r=lora["rank"], lora_alpha=lora["alpha"], target_modules=lora["targets"])
    adapted = get_peft_model(load_model(lab.model(model)), config)
    loaded = set_peft_model_state_dict(adapted, results[0]["ours"][-1]["adapter"])
    assert not loaded.unexpected_keys
    assert not [key for key in loaded.missing_keys if ".lora_" in key]
    export, found = AutoModelForCausalLM.from_pretrained(
        lab.folder / "adapters" / name, output_loading_info=True
    )
    assert not found["missing_keys"]
    for rank, result in enumerate(results):
        mine = lab.batches(model)[0][rank::ranks]
        for whole in (adapted, export):
            with torch.no_grad():
                own = torch.cat([token_logprobs(whole, s, 1.0) for s in mine])
            assert float((result["logprobs"] - own).abs().max()) < 5e-6
