"""Tables and plot of `spiral-mega plan`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

from spiral_mega.capacity import hardware
from spiral_mega.capacity.hardware import GIB, Machine
from spiral_mega.capacity.memory import Phase
from spiral_mega.capacity.search import Changes, Layout
from spiral_mega.capacity.step_time import TEMPLATE_TOKENS, StepTime
from spiral_mega.capacity.traced_update import Traced
from spiral_mega.config import Config
from spiral_mega.models.dimensions import ModelSizes
from spiral_mega.simulation.workload import Gpu, Lengths

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def summary(phases: Sequence[Phase], machine: Machine) -> str:
    """Summarise the peak in one line; shipped configurations repeat it in a comment."""
    most = max(phases, key=lambda phase: phase.total)
    return f"{most.total / GIB:.1f} GiB of {machine.memory / GIB:.1f} per rank at the peak ({most.name})"


def memory_table(phases: Sequence[Phase]) -> str:
    """Tabulate GiB by purpose, one column per phase."""
    names = list(dict.fromkeys(name for phase in phases for name in phase.parts))
    lines = [f"{'GiB per rank':28}" + "".join(f"{phase.name:>16}" for phase in phases)]
    for name in names:
        cells = "".join(
            f"{phase.parts[name] / GIB:16.2f}" if name in phase.parts else " " * 16
            for phase in phases
        )
        lines.append(f"{name:28}{cells}")
    lines.append(f"{'total':28}" + "".join(f"{phase.total / GIB:16.1f}" for phase in phases))
    return "\n".join(lines)


def trace_lines(traced: Traced, phases: Sequence[Phase]) -> str:
    """Compare the traced update with the analytic model of the same tensors."""
    (training,) = [phase for phase in phases if phase.name == "training"]
    others = ("context", "engine weights", "KV cache", "fragmentation")
    same = sum(size for name, size in training.parts.items() if name not in others)
    parts = ", ".join(
        f"{name.lower()} {size / GIB:.2f}"
        for name, size in traced.parts.items()
        if size > 0.005 * GIB
    )
    return (
        f"traced update: {traced.peak / GIB:.2f} GiB of tensors at the peak, on {traced.tokens} "
        f"tokens ({parts});\nthe analytic model gives {same / GIB:.2f} GiB for them and the "
        "gradients of earlier micro-batches"
    )


def time_lines(time: StepTime) -> str:
    parts = {
        "sampling": time.sampling,
        "training": time.training,
        "optimizer": time.optimizer,
        "sync": time.sync,
    }
    shown = ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items())
    return (
        f"step: {time.total:.0f} s ({shown}); {time.sampled_tokens / 1e6:.1f} M tokens sampled, "
        f"{time.trained_tokens / 1e6:.1f} M distinct tokens trained on"
    )


def change_line(changes: Changes) -> str:
    """Write changes as command-line overrides."""
    values = {
        key: str(value).lower() if isinstance(value, bool) else value
        for key, value in changes.items()
    }
    return " ".join(f"{key}={value}" for key, value in values.items())


def remedy_lines(found: Sequence[tuple[Changes, float]], machine: Machine) -> str:
    if not found:
        return "no change of a single key lowers it: use more nodes, larger GPUs, or LoRA"
    return "\n".join(
        f"  {change_line(changes):48} {peak / GIB:6.1f} "
        f"GiB{'' if peak <= machine.memory else ', not enough by itself'}"
        for changes, peak in found
    )


def search_lines(layouts: Sequence[Layout]) -> str:
    if not layouts:
        return "no layout fits"
    return "\n".join(
        f"  {layout.time.total:6.0f} s {layout.peak / GIB:6.1f} GiB  {change_line(layout.changes)}"
        for layout in layouts
    )


def assumptions(
    config: Config, sizes: ModelSizes, machine: Machine, nodes: int, lengths: Lengths
) -> str:
    longest = config.rollout.sampling.max_response_tokens
    gpu, collectives = Gpu(), "overlapped with arithmetic"
    host = [
        f"  rank 0 reads the model into {4 * sizes.params / GIB:.0f} GiB of host memory at the start"
    ]
    if config.policy.backend == "megatron":
        collectives, host = "not overlapped, experts equally busy", []
    return "\n".join(
        (
            "assumptions, none measured on a GPU:",
            f"  {nodes * machine.node_gpus} GPUs {machine.name}: {machine.flops / 1e12:.0f} "
            f"TFLOP/s, {machine.bandwidth / 1e12:.2f} TB/s, links {machine.node_link / 1e9:.0f}, "
            f"{machine.network / 1e9:.0f} GB/s",
            f"  of these: training {hardware.TRAINING_SHARE:.0%} of FLOP/s, prefill and decoding "
            f"{gpu.flops_share:.0%}, memory {gpu.bandwidth_share:.0%}, links "
            f"{hardware.LINK_SHARE:.0%}; collectives {collectives}",
            f"  a process {hardware.CONTEXT_BYTES / GIB:g} GiB, vLLM "
            f"{hardware.ENGINE_OVERHEAD / GIB:g} GiB on top of weights and cache, torch's "
            f"allocator {hardware.FRAGMENTATION:.0%} more than its tensors",
            f"  responses lognormal, median {lengths.median:g} tokens, truncated at {longest}; "
            f"aggregation prompts {TEMPLATE_TOKENS} tokens on top of problem and traces; every "
            "problem effective",
            *host,
        )
    )


def plot(
    phases: Sequence[Phase], machine: Machine, time: StepTime | None, title: str, path: Path
) -> None:
    """Plot memory through a step, stacked by purpose. A phase is as wide as its time, with a minimum width."""
    seconds = {} if time is None else {
        "sampling": time.sampling, "training": time.training, "optimizer step": time.optimizer, "weight sync": time.sync
    }  # fmt: skip
    total = sum(seconds.values()) or 1.0
    widths = [max(0.13, seconds.get(phase.name, total / len(phases)) / total) for phase in phases]
    starts = [sum(widths[:i]) for i in range(len(widths))]
    names = list(dict.fromkeys(name for phase in phases for name in phase.parts))
    figure, axes = plt.subplots(figsize=(10, 5), layout="constrained")
    bottom = [0.0] * len(phases)
    for name, color in zip(names, plt.get_cmap("tab20").colors * 2, strict=False):
        heights = [phase.parts.get(name, 0.0) / GIB for phase in phases]
        axes.bar(
            starts,
            heights,
            widths,
            bottom,
            align="edge",
            color=color,
            label=name,
            edgecolor="white",
            linewidth=0.5,
        )
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    axes.axhline(machine.memory / GIB, color="black", linewidth=1)
    axes.set_xticks(
        [start + width / 2 for start, width in zip(starts, widths, strict=True)],
        [p.name.replace(" ", "\n") for p in phases],
    )
    axes.set(ylabel=f"GiB on a rank ({machine.name} has {machine.memory / GIB:.0f})", title=title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=150)
    plt.close(figure)
