"""What the ranks do for the tests of the policy. Runs under torchrun; results go back whole, by parameter name."""

import random
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from spiral_mega.checkpoint.manager import CheckpointManager
from spiral_mega.distributed.runtime import Runtime
from spiral_mega.errors import UserError
from spiral_mega.packing.distribute import distribute
from spiral_mega.packing.training_sequence import TrainingSequence
from spiral_mega.policy.fsdp.fsdp_policy import FsdpPolicy
from tests.support.configs import make_config

Sections = dict[str, dict[str, Any]]
Tensors = dict[str, torch.Tensor]


def run_cases(runtime: Runtime, cases: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Every case by name: one of the functions below and its arguments. One launch serves them all."""
    return {
        name: globals()[function](runtime, **arguments)
        for name, (function, arguments) in cases.items()
    }


def gradients(
    runtime: Runtime,
    model: Path,
    sections: Sections,
    splits: dict[str, tuple[list[TrainingSequence], int, int]],
    adapters: Tensors | None = None,
) -> dict[str, Any]:
    """The gradient that would reach the optimizer, for each of `splits`: sequences, token budget, seed of ownership."""
    policy = FsdpPolicy(make_config(model, **sections), runtime)
    for name, whole in (adapters or {}).items():
        _set(policy.model.get_parameter(name), whole)
    taken: Tensors = {}

    def take_instead_of_stepping() -> None:
        taken.clear()
        taken.update(
            {n: _whole(p.grad) for n, p in policy.model.named_parameters() if p.grad is not None}
        )

    policy.optimizer.step = take_instead_of_stepping  # type: ignore[method-assign, assignment]
    results = {}
    for name, (sequences, budget, seed) in splits.items():
        metrics = policy.update(
            distribute(_owned(runtime, sequences, seed), budget, policy.replica)
        )
        results[name] = {"metrics": metrics, "gradients": dict(taken)}
    return results | {"dtypes": {p.dtype for p in policy.model.parameters()}}


def logprobs(
    runtime: Runtime,
    model: Path,
    sections: Sections,
    sequences: list[TrainingSequence],
    adapters: Tensors | None,
) -> dict[tuple[int, int], torch.Tensor]:
    """By key, of `sequences`, which are all rank 0's: the others take part with none."""
    policy = FsdpPolicy(make_config(model, **sections), runtime)
    for name, whole in (adapters or {}).items():
        _set(policy.model.get_parameter(name), whole)
    mine = sequences if runtime.is_main else []
    parts = policy.logprobs(mine).split([len(s.response_ids) for s in mine] or [0])
    return {s.key: part for s, part in zip(mine, parts, strict=False)}


def updates(
    runtime: Runtime,
    model: Path,
    sections: Sections,
    batches: list[list[TrainingSequence]],
    export: Path | None = None,
) -> dict[str, Any]:
    """One update a batch: metrics and trained weights after each, the streamed weights before and after all."""
    policy = FsdpPolicy(make_config(model, **sections), runtime)
    start, at_start = _streamed(policy), _trained(policy)
    after, metrics, optimizer_kept = [], [], []
    for index, batch in enumerate(batches):
        before = _optimizer_tensors(policy)
        metrics.append(policy.update(distribute(_owned(runtime, batch, index), 40, policy.replica)))
        optimizer_kept.append(_same(before, _optimizer_tensors(policy)))
        after.append(_trained(policy))
    if export is not None:
        policy.save_pretrained(export)
    heads = {
        id(module.weight)
        for name, module in policy.model.named_modules()
        if name.endswith(("embed_tokens", "lm_head"))
    }
    return {
        "start": start,
        "at_start": at_start,
        "end": _streamed(policy),
        "metrics": metrics,
        "after": after,
        "optimizer_kept": optimizer_kept,
        "dtypes": {p.dtype for p in policy.model.parameters()},
        "head_tensors": len(heads),
    }


def interrupted(
    runtime: Runtime,
    model: Path,
    sections: Sections,
    batches: list[list[TrainingSequence]],
    folder: Path,
) -> dict[str, Any]:
    """Train through all of `batches`, saving before the first and after it; then twice again from what was saved."""
    checkpoints = CheckpointManager(folder, keep_last=5)
    policy = FsdpPolicy(make_config(model, **sections), runtime)
    # Saving must not disturb: the uninterrupted run is another policy, which never saves.
    undisturbed = FsdpPolicy(make_config(model, **sections), runtime)
    results: dict[str, Any] = {"undisturbed": _train_on(undisturbed, runtime, batches)}
    checkpoints.save(0, {"policy": policy.state_dict()}, {})
    first = _train_on(policy, runtime, batches[:1])
    checkpoints.save(1, {"policy": policy.state_dict()}, {})
    rest = _train_on(policy, runtime, batches[1:])
    results["saving"] = {key: first[key] + rest[key] for key in first}
    checkpoints.wait()
    for step in (0, 1):
        results[f"from {step}"] = resumed(runtime, model, sections, batches[step:], folder, step)
    return results


def resumed(
    runtime: Runtime,
    model: Path,
    sections: Sections,
    batches: list[list[TrainingSequence]],
    folder: Path,
    step: int,
) -> dict[str, Any]:
    """Train on `batches` from the checkpoint of `step`, with a policy whose own start is another."""
    checkpoints = CheckpointManager(folder, keep_last=5)
    other = {"run": sections.get("run", {}) | {"seed": 77}}
    policy = FsdpPolicy(make_config(model, **(sections | other)), runtime)
    for parameter in policy.model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(1.0)
    state = checkpoints.load(step, {"policy": policy.state_dict()})
    policy.load_state_dict(state["policy"])
    return _train_on(policy, runtime, batches)


def build_error(runtime: Runtime, model: Path, sections: Sections) -> str:
    """What a user is told when the policy cannot be built; any other error fails the rank."""
    try:
        FsdpPolicy(make_config(model, **sections), runtime)
    except UserError as error:
        return str(error)
    return "no error"


def _train_on(
    policy: FsdpPolicy, runtime: Runtime, batches: list[list[TrainingSequence]]
) -> dict[str, list[Any]]:
    metrics, after = [], []
    for index, batch in enumerate(batches):
        metrics.append(policy.update(distribute(_owned(runtime, batch, index), 60, policy.replica)))
        after.append(_trained(policy))
    return {"metrics": metrics, "after": after}


def _owned(
    runtime: Runtime, sequences: list[TrainingSequence], seed: int
) -> list[TrainingSequence]:
    """This rank's share of a random ownership; seed 0 gives everything to rank 0."""
    rng = random.Random(seed)
    owners = [rng.randrange(runtime.world_size) if seed else 0 for _ in sequences]
    mine = [
        sequence for sequence, owner in zip(sequences, owners, strict=True) if owner == runtime.rank
    ]
    rng.shuffle(mine)
    return mine


def _streamed(policy: FsdpPolicy) -> Tensors:
    # On one rank the streamed tensors are the parameters themselves, as good as the next update.
    return {name: tensor.clone() for name, tensor in policy.weights()}


def _trained(policy: FsdpPolicy) -> Tensors:
    return {name: _whole(p) for name, p in policy.model.named_parameters() if p.requires_grad}


def _optimizer_tensors(policy: FsdpPolicy) -> list[torch.Tensor]:
    return [
        _whole(value)
        for state in policy.optimizer.state.values()
        for _, value in sorted(state.items())
    ]


def _same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _set(parameter: torch.Tensor, whole: torch.Tensor) -> None:
    assert isinstance(parameter, DTensor)
    parameter.data.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements))
