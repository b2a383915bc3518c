"""What the ranks do for the tests of the Megatron policy. Runs under torchrun; results go back by Hugging Face name."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from spiral_mega.checkpoint.manager import CheckpointManager
from spiral_mega.distributed.runtime import Runtime
from spiral_mega.packing.distribute import distribute
from spiral_mega.packing.training_sequence import TrainingSequence
from tests.policy.workers import _owned
from tests.support.configs import make_config
from tests.support.megatron_on_cpu import install

install()

from megatron.core import parallel_state  # noqa: E402

from spiral_mega.policy.fsdp.fsdp_policy import FsdpPolicy  # noqa: E402
from spiral_mega.policy.megatron.families import ShardRange  # noqa: E402
from spiral_mega.policy.megatron.megatron_policy import MegatronPolicy  # noqa: E402
from spiral_mega.policy.protocol import Policy  # noqa: E402

Sections = dict[str, dict[str, Any]]
Tensors = dict[str, torch.Tensor]


def run_cases(runtime: Runtime, cases: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Every case by name: one of the functions below and its arguments. One launch serves them all."""
    results = {}
    for name, (function, arguments) in cases.items():
        results[name] = globals()[function](runtime, **arguments)
        _end_groups()
    return results


def _end_groups() -> None:
    """megatron-core forgets a layout's groups without ending them, and each keeps three threads."""
    parallel_state.destroy_model_parallel()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def gradients(
    runtime: Runtime,
    model: Path,
    sections: Sections,
    splits: dict[str, tuple[list[TrainingSequence], int, int]],
    adapters: Tensors | None = None,
) -> dict[str, Any]:
    """The gradient that would reach the optimizer, and log-probs of every `world_size`-th sequence, for each of
    `splits`: sequences, token budget, seed of ownership. The streamed weights at the start."""
    policy = MegatronPolicy(make_config(model, **sections), runtime)
    if adapters is not None:
        whole_factors = {
            name.replace(".default.", "."): tensor for name, tensor in adapters.items()
        }
        policy.model.trained.load(lambda name, p: whole_factors[name][_index(p)])
    taken: Tensors = {}

    def take_instead_of_stepping(norm: float) -> None:
        taken.clear()
        whole = {p: _gradient(policy, p) for _, p in policy.model.trained.local_params}
        taken.update(policy.model.trained.stream(whole.__getitem__, torch.float32, 2**16))

    policy.optimizer.step = take_instead_of_stepping  # type: ignore[method-assign]
    results: dict[str, Any] = {"weights": _streamed(policy)}
    for name, (sequences, budget, seed) in splits.items():
        metrics = policy.update(
            distribute(_owned(runtime, sequences, seed), budget, policy.replica)
        )
        mine = sequences[runtime.rank :: runtime.world_size]
        results[name] = {
            "metrics": metrics,
            "gradients": dict(taken),
            "logprobs": policy.logprobs(mine),
        }
    return results


def updates(
    runtime: Runtime,
    model: Path,
    sections: Sections,
    batches: dict[str, list[list[TrainingSequence]]],
    fsdp: bool,
) -> dict[str, Any]:
    """One update a batch, of this policy and with `fsdp` of that on FSDP2: metrics and weights after each."""
    results = {}
    for name, each in batches.items():
        results[name] = _train(
            MegatronPolicy(make_config(model, **sections), runtime), runtime, each
        )
    if fsdp:
        plain = sections | {"policy": {}}
        results["fsdp"] = _train(
            FsdpPolicy(make_config(model, **plain), runtime), runtime, batches["clean"]
        )
    return results


def updates_of_adapters(
    runtime: Runtime,
    model: Path,
    sections: Sections,
    batches: list[list[TrainingSequence]],
    folder: Path,
) -> dict[str, Any]:
    """One update a batch: the adapters at the start and after each, of this policy and of that on FSDP2. What a
    checkpoint and the engine would get at the end."""
    ours = MegatronPolicy(make_config(model, **sections), runtime)
    plain = {
        key: value
        for key, value in sections["policy"].items()
        if key not in ("backend", "megatron")
    }
    theirs = FsdpPolicy(make_config(model, **(sections | {"policy": plain})), runtime)
    results: dict[str, Any] = {}
    for name, policy in {"ours": ours, "theirs": theirs}.items():
        results[name] = [{"adapter": _copied(policy.adapter())}]
        for index, batch in enumerate(batches):
            metrics = policy.update(distribute(_owned(runtime, batch, index), 40, policy.replica))
            results[name].append({"adapter": _copied(policy.adapter()), "metrics": metrics})
    ours.save_pretrained(folder)
    return results | {
        "saved": set(ours.state_dict()["param"]),
        "merged": _streamed(ours),
        "base": _copied(ours.weights(merge=False)),
        "logprobs": ours.logprobs(batches[0][runtime.rank :: runtime.world_size]),
    }


def _train(
    policy: Policy, runtime: Runtime, batches: list[list[TrainingSequence]]
) -> list[dict[str, Any]]:
    steps = []
    for index, batch in enumerate(batches):
        metrics = policy.update(distribute(_owned(runtime, batch, index), 40, policy.replica))
        steps.append({"metrics": metrics, "weights": _streamed(policy)})
    return steps


def _gradient(policy: MegatronPolicy, parameter: torch.nn.Parameter) -> torch.Tensor:
    """The gradient of this rank's `parameter`, of which every replica has a flat share."""
    optimizer, main, start, stop = policy.optimizer.local_shard(parameter)
    whole = torch.zeros(parameter.numel())
    if main is not None:
        whole[start:stop] = main.grad.flatten()
    dist.all_reduce(whole, group=optimizer.data_parallel_group)
    return whole.view_as(parameter)


def _streamed(policy: Policy) -> Tensors:
    return _copied(policy.weights())


def _copied(tensors: Iterable[tuple[str, torch.Tensor]]) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors}


def _index(part: ShardRange) -> tuple[slice, ...]:
    whole = slice(None)
    return {
        None: (whole,),
        0: (slice(part.start, part.stop),),
        1: (whole, slice(part.start, part.stop)),
    }[part.dim]


def interrupted(
    runtime: Runtime,
    model: Path,
    sections: Sections,
    batches: list[list[TrainingSequence]],
    folder: Path,
) -> dict[str, Any]:
    """Train through all of `batches`, saving after the first; then again from what was saved."""
    checkpoints = CheckpointManager(folder, keep_last=5)
    policy = MegatronPolicy(make_config(model, **sections), runtime)
    first = _train(policy, runtime, batches[:1])
    checkpoints.save(1, {"policy": policy.state_dict()}, {})
    rest = _train(policy, runtime, batches[1:])
    checkpoints.wait()
    return {
        "whole": first + rest,
        "resumed": resumed(runtime, model, sections, batches[1:], folder),
    }


def resumed(
    runtime: Runtime,
    model: Path,
    sections: Sections,
    batches: list[list[TrainingSequence]],
    folder: Path,
) -> list[dict[str, Any]]:
    """Train on `batches` from the checkpoint after the first, in a policy trained on something else before."""
    policy = MegatronPolicy(make_config(model, **sections), runtime)
    _train(policy, runtime, batches[:1])
    state = CheckpointManager(folder, keep_last=5).load(1, {"policy": policy.state_dict()})
    policy.load_state_dict(state["policy"])
    return _train(policy, runtime, batches)
