"""Check before a run that nodes are fit to train: each node alone, or all ranks together.

    python -m spiral_mega.launch.health --folder runs/x                      this node
    launch/torchrun.sh -m spiral_mega.launch.health --folder runs/x          all ranks, also together

Prints a line for each node, "health: ok HOST ..." or "health: bad HOST: reason", and exits with
status 1 if any is bad.
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
ALL_REDUCE_BYTES = {"cuda": 512 * 2**20, "cpu": 4 * 2**20}
MATRIX_SIZE = {"cuda": 8192, "cpu": 512}
NVIDIA_FIELDS = (
    *(
        "index",
        "clocks_throttle_reasons.hw_slowdown",
        "clocks_throttle_reasons.hw_thermal_slowdown",
    ),
    *("clocks_throttle_reasons.hw_power_brake_slowdown", "ecc.errors.uncorrected.volatile.total"),
)


@dataclass(frozen=True)
class Limits:
    """What a node must have. Bandwidth: bus bandwidth in GB/s, as in NCCL's tests; 0: any."""

    min_disk_gib: float
    min_shm_gib: float
    min_gpu_free: float
    max_clock_skew_s: float
    min_speed: float
    min_bandwidth: float


@dataclass
class Report:
    """The findings of one rank.

    `rate`: matrix products, in TFLOP/s. `clock`: seconds since 1970, read by all ranks at the same
    moment.
    """

    host: str
    rank: int
    device: str
    problems: list[str]
    free_disk_gib: float
    clock: float = 0.0
    rate: float = 0.0
    bandwidth: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)


def check_node(
    folder: Path, devices: Sequence[torch.device], limits: Limits, rank: int = 0
) -> Report:
    """Check this node alone: disk, shared memory, and each of the CUDA `devices`."""
    existing = next(
        path for path in (folder.absolute(), *folder.absolute().parents) if path.exists()
    )
    free = shutil.disk_usage(existing).free / GIB
    problems = []
    if free < limits.min_disk_gib:
        problems.append(
            f"{free:.1f} GiB are free at {existing}, fewer than {limits.min_disk_gib:g}"
        )
    if (shared := shutil.disk_usage("/dev/shm").free / GIB) < limits.min_shm_gib:
        problems.append(f"{shared:.2f} GiB are free in /dev/shm, fewer than {limits.min_shm_gib:g}")
    cuda = [device for device in devices if device.type == "cuda"]
    for device in cuda:
        available, total = torch.cuda.mem_get_info(device)
        if available < limits.min_gpu_free * total:
            problems.append(
                f"{available / GIB:.1f} of {total / GIB:.1f} GiB of {device} are free: another "
                "process holds the rest"
            )
    if cuda:
        problems += gpu_problems(_nvidia_smi())
    names = {torch.cuda.get_device_name(device) for device in cuda} or {"cpu"}
    versions = {"torch": torch.__version__, "python": sys.version.split()[0]}
    return Report(
        socket.gethostname(), rank, ", ".join(sorted(names)), problems, free, versions=versions
    )


def gpu_problems(table: str) -> list[str]:
    """Return the problems in nvidia-smi's CSV of NVIDIA_FIELDS, without header and units."""
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
    """Add checks between ranks to the reports; return those of all ranks, on every rank; collective."""
    device = runtime.device
    dist.barrier()
    report.clock = time.time()
    ones = torch.full((4,), float(runtime.rank + 1), device=device)
    dist.all_reduce(ones)
    if float(ones[0]) != runtime.world_size * (runtime.world_size + 1) / 2:
        report.problems.append(
            f"an all-reduce gave {float(ones[0])}: the network or a device computes wrongly"
        )
    report.rate = _matrix_rate(runtime)
    report.bandwidth = _bandwidth(runtime)
    return compare(gather_objects(report), limits)


def compare(reports: list[Report], limits: Limits) -> list[Report]:
    """Add to `reports` the problems that show when they are compared."""
    clock, rate = median(each.clock for each in reports), median(each.rate for each in reports)
    versions = max(
        (each.versions for each in reports), key=[each.versions for each in reports].count
    )
    for each in reports:
        if abs(each.clock - clock) > limits.max_clock_skew_s:
            each.problems.append(f"its clock is {each.clock - clock:+.1f} s from the others'")
        if each.rate < limits.min_speed * rate:
            each.problems.append(
                f"rank {each.rank} multiplies at {each.rate:.3g} TFLOP/s, below "
                f"{limits.min_speed:g} of the median ({rate:.3g})"
            )
        if each.versions != versions:
            each.problems.append(f"it has {each.versions}, others {versions}")
        if len(reports) > 1 and each.bandwidth < limits.min_bandwidth:
            each.problems.append(
                f"all-reduce at {each.bandwidth:.2f} GB/s, below {limits.min_bandwidth:g}"
            )
    return reports


def format_lines(reports: Sequence[Report]) -> list[str]:
    """Return a line for each node, in the order of ranks."""
    hosts: dict[str, list[Report]] = {}
    for each in reports:
        hosts.setdefault(each.host, []).append(each)
    return [_format_line(host, of_host) for host, of_host in hosts.items()]


def _format_line(host: str, reports: Sequence[Report]) -> str:
    problems = list(dict.fromkeys(problem for each in reports for problem in each.problems))
    if problems:
        return f"health: bad {host}: {'; '.join(problems)}"
    slowest = min(reports, key=lambda each: each.rate)
    speed = ""
    if slowest.rate:
        speed = f"{slowest.rate:.3g} TFLOP/s, all-reduce {slowest.bandwidth:.2f} GB/s, "
    devices = f"{len(reports)} x {reports[0].device}"
    return f"health: ok {host} ({devices}, {speed}{reports[0].free_disk_gib:.0f} GiB free)"


def _nvidia_smi() -> str:
    query = f"--query-gpu={','.join(NVIDIA_FIELDS)}"
    done = subprocess.run(
        ["nvidia-smi", query, "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


def _matrix_rate(runtime: Runtime) -> float:
    """Measure square matrix products: TFLOP/s, the best of some rounds."""
    n = MATRIX_SIZE[runtime.device.type]
    a = torch.ones(
        n, n, device=runtime.device, dtype=torch.bfloat16 if runtime.device.type == "cuda" else None
    )
    seconds = [_timed(runtime, lambda: a @ a) for _ in range(ROUNDS)]
    return 2 * n**3 / min(seconds) / 1e12


def _bandwidth(runtime: Runtime) -> float:
    """Measure the bus bandwidth of an all-reduce: GB/s, the best of some rounds; collective."""
    n = runtime.world_size
    data = torch.zeros(ALL_REDUCE_BYTES[runtime.device.type] // 4, device=runtime.device)
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, required=True, help="run.dir, whose file system must have space"
    )
    for flag, default, text in (
        ("--min-disk-gib", 50.0, "free disk space there, in GiB"),
        ("--min-shm-gib", 1.0, "free space in /dev/shm, in GiB"),
        ("--min-gpu-free", 0.95, "free fraction of GPU memory"),
        ("--max-clock-skew-s", 5.0, "difference of a node's clock from the median, in seconds"),
        ("--min-speed", 0.8, "fraction of the median rank's speed of matrix products"),
        ("--min-bandwidth", 0.0, "bus bandwidth of an all-reduce, in GB/s; 0: any"),
    ):
        parser.add_argument(
            flag, type=float, default=default, help=f"{text} (default: %(default)s)"
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
        print("\n".join(format_lines(reports)), flush=True)
    return int(any(each.problems for each in reports))


if __name__ == "__main__":
    with skip_teardown():
        sys.exit(main())
