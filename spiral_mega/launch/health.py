"""Are these nodes fit to train? Run before a run, on each node alone or on all ranks together.

    python -m spiral_mega.launch.health --folder runs/x                                  this node
    launch/torchrun.sh -m spiral_mega.launch.health --folder runs/x                      and all ranks among each other

Prints a line for each node, "health: ok HOST ..." or "health: bad HOST: why", and ends with status 1 if one is bad.
"""

from __future__ import annotations

import argparse
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from spiral_mega.distributed.collectives import gather_objects
from spiral_mega.distributed.runtime import Runtime, start_runtime
from spiral_mega.errors import UserError
from spiral_mega.process.exit import skip_teardown

GIB = 1024**3
ROUNDS = 5
REDUCED_BYTES = {"cuda": 512 * 2**20, "cpu": 4 * 2**20}
MATRIX = {"cuda": 8192, "cpu": 512}
NVIDIA_FIELDS = (
    *("index", "clocks_throttle_reasons.hw_slowdown", "clocks_throttle_reasons.hw_thermal_slowdown"),
    *("clocks_throttle_reasons.hw_power_brake_slowdown", "ecc.errors.uncorrected.volatile.total"),
)


@dataclass(frozen=True)
class Limits:
    """What a node must have. Bandwidth in GB/s, as NCCL's tests count it (bus bandwidth); 0 asks for nothing."""

    disk_gib: float
    shm_gib: float
    gpu_free: float
    clock_s: float
    slowest: float
    bandwidth: float


@dataclass
class Report:
    """What one rank found. `rate` is of matrix products, in TFLOP/s; `clock` seconds since 1970, all at one moment."""

    host: str
    rank: int
    device: str
    problems: list[str]
    free_disk_gib: float
    clock: float = 0.0
    rate: float = 0.0
    bandwidth: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)


def check_node(folder: Path, devices: Sequence[torch.device], limits: Limits, rank: int = 0) -> Report:
    """What can be seen from here alone: disk, shared memory, and each of the CUDA `devices`."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free / GIB
    problems = []
    if free < limits.disk_gib:
        problems.append(f"{free:.1f} GiB are free at {existing}, fewer than {limits.disk_gib:g}")
    if (shared := shutil.disk_usage("/dev/shm").free / GIB) < limits.shm_gib:
        problems.append(f"{shared:.2f} GiB are free in /dev/shm, fewer than {limits.shm_gib:g}")
    cuda = [device for device in devices if device.type == "cuda"]
    for device in cuda:
        available, total = torch.cuda.mem_get_info(device)
        if available < limits.gpu_free * total:
            problems.append(
                f"{available / GIB:.1f} of {total / GIB:.1f} GiB of {device} are free: another process holds the rest"
            )
    if cuda:
        problems += throttled(_nvidia_smi())
    names = {torch.cuda.get_device_name(device) for device in cuda} or {"cpu"}
    versions = {"torch": torch.__version__, "python": sys.version.split()[0]}
    return Report(socket.gethostname(), rank, ", ".join(sorted(names)), problems, free, versions=versions)


def throttled(table: str) -> list[str]:
    """What nvidia-smi's answer to NVIDIA_FIELDS, as CSV without header and units, says is wrong."""
    problems = []
    for line in table.splitlines():
        index, *values = (value.strip() for value in line.split(","))
        for name, value in zip(NVIDIA_FIELDS[1:], values, strict=True):
            if value == "Active":
                problems.append(f"GPU {index} runs at a lowered clock ({name.rpartition('.')[2]})")
            elif value.isdigit() and int(value):
                problems.append(f"GPU {index} has {value} uncorrected memory errors")
    return problems


def check_all(report: Report, runtime: Runtime, limits: Limits) -> list[Report]:
    """Complete every rank's report by what shows among ranks; all of them, on every rank; collective."""
    device = runtime.device
    dist.barrier()
    report.clock = time.time()
    ones = torch.full((4,), float(runtime.rank + 1), device=device)
    dist.all_reduce(ones)
    if float(ones[0]) != runtime.world_size * (runtime.world_size + 1) / 2:
        report.problems.append(f"an all-reduce gave {float(ones[0])}: the network or a device computes wrongly")
    report.rate = _matrix_rate(runtime)
    report.bandwidth = _bandwidth(runtime)
    return judge(gather_objects(report), limits)


def judge(reports: list[Report], limits: Limits) -> list[Report]:
    """`reports` with the problems that show when they are compared."""
    clock, rate = median(each.clock for each in reports), median(each.rate for each in reports)
    versions = max((each.versions for each in reports), key=[each.versions for each in reports].count)
    for each in reports:
        if abs(each.clock - clock) > limits.clock_s:
            each.problems.append(f"its clock is {each.clock - clock:+.1f} s from the others'")
        if each.rate < limits.slowest * rate:
            each.problems.append(
                f"rank {each.rank} multiplies at {each.rate:.3g} TFLOP/s, below {limits.slowest:g} of the median "
                f"({rate:.3g})"
            )
        if each.versions != versions:
            each.problems.append(f"it has {each.versions}, others {versions}")
        if len(reports) > 1 and each.bandwidth < limits.bandwidth:
            each.problems.append(f"all-reduce at {each.bandwidth:.2f} GB/s, below {limits.bandwidth:g}")
    return reports


def lines(reports: Sequence[Report]) -> list[str]:
    """What is printed: a line for each node, in order of its ranks."""
    hosts: dict[str, list[Report]] = {}
    for each in reports:
        hosts.setdefault(each.host, []).append(each)
    found = []
    for host, own in hosts.items():
        if problems := list(dict.fromkeys(problem for each in own for problem in each.problems)):
            found.append(f"health: bad {host}: {'; '.join(problems)}")
            continue
        slowest = min(own, key=lambda each: each.rate)
        figures = f"{slowest.rate:.3g} TFLOP/s, all-reduce {slowest.bandwidth:.2f} GB/s, " if slowest.rate else ""
        found.append(f"health: ok {host} ({len(own)} x {own[0].device}, {figures}{own[0].free_disk_gib:.0f} GiB free)")
    return found


def _nvidia_smi() -> str:
    query = f"--query-gpu={','.join(NVIDIA_FIELDS)}"
    done = subprocess.run(
        ["nvidia-smi", query, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


def _matrix_rate(runtime: Runtime) -> float:
    """TFLOP/s of square matrix products, the best of some rounds."""
    n = MATRIX[runtime.device.type]
    a = torch.ones(n, n, device=runtime.device, dtype=torch.bfloat16 if runtime.device.type == "cuda" else None)
    seconds = [_timed(runtime, lambda: a @ a) for _ in range(ROUNDS)]
    return 2 * n**3 / min(seconds) / 1e12


def _bandwidth(runtime: Runtime) -> float:
    """Bus bandwidth of an all-reduce, in GB/s, the best of some rounds; collective."""
    n = runtime.world_size
    data = torch.zeros(REDUCED_BYTES[runtime.device.type] // 4, device=runtime.device)
    seconds = []
    for _ in range(ROUNDS):
        dist.barrier()
        seconds.append(_timed(runtime, lambda: dist.all_reduce(data)))
    return 2 * (n - 1) / n * data.nbytes / min(seconds) / 1e9


def _timed(runtime: Runtime, work: Callable[[], object]) -> float:
    runtime.synchronize()
    start = time.perf_counter()
    work()
    runtime.synchronize()
    return time.perf_counter() - start


def _parse(arguments: Sequence[str] | None) -> tuple[Path, Limits]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="run.dir: its file system must have space")
    parser.add_argument("--disk-gib", type=float, default=50.0, help="least free space there (default: %(default)s)")
    parser.add_argument("--shm-gib", type=float, default=1.0, help="least free in /dev/shm (default: %(default)s)")
    parser.add_argument(
        "--gpu-free", type=float, default=0.95, help="least free share of memory (default: %(default)s)"
    )
    parser.add_argument("--clock-s", type=float, default=5.0, help="most that clocks may differ (default: %(default)s)")
    parser.add_argument(
        "--slowest", type=float, default=0.8, help="least share of the median rank's speed (default: %(default)s)"
    )
    parser.add_argument(
        "--bandwidth", type=float, default=0.0, help="least all-reduce bus bandwidth, GB/s (default: any)"
    )
    values = vars(parser.parse_args(arguments))
    return values.pop("folder"), Limits(**values)


def main(arguments: Sequence[str] | None = None) -> int:
    folder, limits = _parse(arguments)
    try:
        with start_runtime(timeout_minutes=5.0) as runtime:
            alone = runtime.world_size == 1
            every = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
            report = check_node(folder, every if alone else [runtime.device], limits, runtime.rank)
            reports = check_all(report, runtime, limits)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if runtime.is_main:
        print("\n".join(lines(reports)), flush=True)
    return int(any(each.problems for each in reports))


if __name__ == "__main__":
    with skip_teardown():
        sys.exit(main())
