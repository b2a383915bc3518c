"""What the ranks do for the tests of two models. Runs under torchrun; results go back whole, by parameter name."""

from pathlib import Path
from typing import Any

import torch

from spiral_mega.distributed.runtime import Runtime
from spiral_mega.packing.distribute import distribute
from spiral_mega.packing.training_sequence import TrainingSequence
from spiral_mega.policy import build_policies
from spiral_mega.policy.fsdp.fsdp_policy import FsdpModel, FsdpPolicy
from tests.policy.cases import LORA, NO_CLIPPING
from tests.policy.workers import Tensors, _optimizer_tensors, _owned, _same, _set, _whole
from tests.support.configs import make_config

Batches = dict[str, list[list[TrainingSequence]]]


def lab(runtime: Runtime, argument: dict[str, Any]) -> dict[str, Any]:
    folder, batches, sections = argument["folder"], argument["batches"], argument["sections"]
    results: dict[str, Any] = {
        "gradients": gradients(runtime, folder, argument["sequences"], argument["adapters"])
    }
    for form in ("adapters", "models"):
        for frozen in (None, "search", "aggregation"):
            model = {"path": str(folder), "lora": LORA if form == "adapters" else None}
            two = sections["two_models"] | {"form": form, "frozen": frozen}
            export = argument["exports"] / form if frozen is None else None
            changed = sections | {"model": model, "two_models": two}
            results[f"{form}, {frozen} frozen"] = updates(runtime, folder, changed, batches, export)
    return results


def updates(
    runtime: Runtime, folder: Path, sections: dict[str, Any], batches: Batches, export: Path | None
) -> dict[str, Any]:
    """Updates of each model in turn: its weights after each, and whether all else stayed as it was, to the bit."""
    policies, frozen = build_policies(make_config(folder, **sections), runtime)
    both: dict[str, Any] = {**policies, **frozen}
    results: dict[str, Any] = {"start": {model: weights(policy) for model, policy in both.items()}}
    results |= {
        "metrics": {model: [] for model in policies},
        "after": {model: [] for model in policies},
        "kept": [],
    }
    for step in range(len(batches["search"])):
        for model, policy in policies.items():
            before = all_but(policy, both)
            sequences = _owned(runtime, batches[model][step], step)
            results["metrics"][model].append(
                policy.update(distribute(sequences, 40, policy.replica))
            )
            results["after"][model].append(weights(policy))
            results["kept"].append(_same(before, all_but(policy, both)))
    results["frozen"] = {
        model: {
            "trained": any(p.requires_grad for p in policy.parameters()),
            "gradients": any(p.grad is not None for p in policy.parameters()),
            "moments": sum(
                id(p) in {id(q) for q in policy.parameters()}
                for p in in_optimizers(policies.values())
            ),
            "end": weights(policy),
        }
        for model, policy in frozen.items()
    }
    results["saved"] = {
        model: sorted(policy.state_dict()["model"]) for model, policy in policies.items()
    }
    if export is not None:
        for model, policy in both.items():
            policy.save_pretrained(export / model)
    return results


def gradients(
    runtime: Runtime,
    folder: Path,
    sequences: dict[str, list[TrainingSequence]],
    adapters: dict[str, Tensors],
) -> dict[str, Tensors]:
    """By model, or "one" for a single model on all sequences, what would reach the optimizer; from equal adapters."""
    common = {"model": {"path": str(folder), "lora": LORA}, "optimizer": NO_CLIPPING}
    one = FsdpPolicy(make_config(folder, **common), runtime)
    policies, _ = build_policies(
        make_config(folder, **common, two_models={"form": "adapters"}), runtime
    )
    found = {}
    for model, policy in {"one": one, **policies}.items():
        assert isinstance(policy, FsdpPolicy)
        for name, parameter in named(policy).items():
            _set(parameter, adapters[name])
        taken: Tensors = {}
        policy.optimizer.step = lambda p=policy, to=taken: to.update(  # type: ignore[method-assign, assignment]
            {name: _whole(parameter.grad) for name, parameter in named(p).items()}
        )
        mine = (
            [s for part in sequences.values() for s in part] if model == "one" else sequences[model]
        )
        policy.update(distribute(_owned(runtime, mine, 1), 60, policy.replica))
        found[model] = taken
    return found


def named(policy: FsdpModel) -> dict[str, Any]:
    """Its own parameters by the name that peft gives those of an adapter that is alone."""
    own = {id(parameter) for parameter in policy.parameters()}
    return {
        name.replace(f".{policy.adapter_name}.weight", ".default.weight"): parameter
        for name, parameter in policy.model.named_parameters()
        if id(parameter) in own
    }


def weights(policy: FsdpModel) -> Tensors:
    return {name: _whole(parameter) for name, parameter in named(policy).items()}


def all_but(policy: FsdpPolicy, both: dict[str, Any]) -> list[torch.Tensor]:
    """Every tensor of either model and its optimizer that is not `policy`'s own."""
    own = {id(parameter) for parameter in policy.parameters()}
    others = [each for each in both.values() if each is not policy]
    parameters = [p for each in others for p in each.model.parameters() if id(p) not in own]
    moments = [
        t for each in others if isinstance(each, FsdpPolicy) for t in _optimizer_tensors(each)
    ]
    return [*map(_whole, parameters), *moments]


def in_optimizers(policies: Any) -> list[Any]:
    return [
        p for policy in policies for group in policy.optimizer.param_groups for p in group["params"]
    ]
