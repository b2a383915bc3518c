"""What the ranks do for the tests of the Megatron policy. Runs under torchrun; results go back by Hugging Face name."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from spiral_mega.checkpoint.manager import CheckpointManager
from spiral_mega.packing.balance import distribute
from spiral_mega.packing.sequences import Sequence
from spiral_mega.runtime import Runtime
from tests.policy.workers import _owned
from tests.support.configs import make_config
from tests.support.megatron_on_cpu import install

install()

from spiral_mega.policy.fsdp.policy import FsdpPolicy  # noqa: E402
from spiral_mega.policy.megatron.policy import MegatronPolicy  # noqa: E402
from spiral_mega.policy.policy import Policy  # noqa: E402

Sections = dict[str, dict[str, Any]]
Tensors = dict[str, torch.Tensor]


def run_cases(runtime: Runtime, cases: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Every case by name: one of the functions below and its arguments. One launch serves them all."""
    return {name: globals()[function](runtime, **arguments) for name, (function, arguments) in cases.items()}


def gradients(
    runtime: Runtime, model: Path, sections: Sections, splits: dict[str, tuple[list[Sequence], int, int]]
) -> dict[str, Any]:
    """The gradient that would reach the optimizer, and log-probs of every `world_size`-th sequence, for each of
    `splits`: sequences, token budget, seed of ownership. The streamed weights at the start."""
    policy = MegatronPolicy(make_config(model, **sections), runtime)
    taken: Tensors = {}

    def take_instead_of_stepping(norm: float) -> None:
        taken.clear()
        whole = {p: _gradient(policy, p) for _, p in policy.shards.owned}
        taken.update(policy.shards.stream(whole.__getitem__, torch.float32, 2**16))

    policy.optimizer.step = take_instead_of_stepping  # type: ignore[method-assign]
    results: dict[str, Any] = {"weights": _streamed(policy)}
    for name, (sequences, budget, seed) in splits.items():
        metrics = policy.update(distribute(_owned(runtime, sequences, seed), budget, policy.replica))
        mine = sequences[runtime.rank :: runtime.world_size]
        results[name] = {"metrics": metrics, "gradients": dict(taken), "logprobs": policy.logprobs(mine)}
    return results


def updates(
    runtime: Runtime, model: Path, sections: Sections, batches: dict[str, list[list[Sequence]]], fsdp: bool
) -> dict[str, Any]:
    """One update a batch, of this policy and with `fsdp` of that on FSDP2: metrics and weights after each."""
    results = {}
    for name, each in batches.items():
        results[name] = _train(MegatronPolicy(make_config(model, **sections), runtime), runtime, each)
    if fsdp:
        plain = sections | {"policy": {}}
        results["fsdp"] = _train(FsdpPolicy(make_config(model, **plain), runtime), runtime, batches["clean"])
    return results


def _train(policy: Policy, runtime: Runtime, batches: list[list[Sequence]]) -> list[dict[str, Any]]:
    steps = []
    for index, batch in enumerate(batches):
        metrics = policy.update(distribute(_owned(runtime, batch, index), 40, policy.replica))
        steps.append({"metrics": metrics, "weights": _streamed(policy)})
    return steps


def _gradient(policy: MegatronPolicy, parameter: torch.nn.Parameter) -> torch.Tensor:
    """The gradient of this rank's `parameter`, of which every replica has a flat share."""
    optimizer, main, start, stop = policy.optimizer.share(parameter)
    whole = torch.zeros(parameter.numel())
    if main is not None:
        whole[start:stop] = main.grad.flatten()
    dist.all_reduce(whole, group=optimizer.data_parallel_group)
    return whole.view_as(parameter)


def _streamed(policy: Policy) -> Tensors:
    return {name: tensor.clone() for name, tensor in policy.weights()}


def interrupted(
    runtime: Runtime, model: Path, sections: Sections, batches: list[list[Sequence]], folder: Path
) -> dict[str, Any]:
    """Train through all of `batches`, saving after the first; then again from what was saved."""
    checkpoints = CheckpointManager(folder, keep_last=5)
    policy = MegatronPolicy(make_config(model, **sections), runtime)
    first = _train(policy, runtime, batches[:1])
    checkpoints.save(1, {"policy": policy.state_dict()}, {})
    rest = _train(policy, runtime, batches[1:])
    checkpoints.wait()
    return {"whole": first + rest, "resumed": resumed(runtime, model, sections, batches[1:], folder)}


def resumed(
    runtime: Runtime, model: Path, sections: Sections, batches: list[list[Sequence]], folder: Path
) -> list[dict[str, Any]]:
    """Train on `batches` from the checkpoint after the first, with a policy that has been led astray before."""
    policy = MegatronPolicy(make_config(model, **sections), runtime)
    _train(policy, runtime, batches[:1])
    state = CheckpointManager(folder, keep_last=5).load(1, {"policy": policy.state_dict()})
    policy.load_state_dict(state["policy"])
    return _train(policy, runtime, batches)
