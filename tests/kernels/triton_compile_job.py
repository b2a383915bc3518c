"""Compile the kernels for GPUs that are not here; print what each cubin uses as a line of JSON.

python -m tests.kernels.triton_compile_job 80 90 100
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from spiral_mega.kernels import gpu
from spiral_mega.kernels.logits import Logits, Term
from spiral_mega.kernels.triton_kernels import gradient_kernel, statistics_kernel

T, H, V, RANK = 16_384, 4096, 151_936, 32  # a micro-batch at Qwen3-8B's head
TOOL = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
HEADS: dict[str, dict[str, Any]] = {
    "plain": {"adapter": False, "bias": False, "softcap": None},
    "bias": {"adapter": False, "bias": True, "softcap": None},
    "adapter": {"adapter": True, "bias": False, "softcap": None},
    "all": {"adapter": True, "bias": True, "softcap": 30.0},
}
VARIANTS = [
    (statistics_kernel, {"WITH_DOT": True}, HEADS),
    (gradient_kernel, {"HAS_ENTROPY": False}, ["plain", "adapter"]),
    (gradient_kernel, {"HAS_ENTROPY": True}, ["plain", "all"]),
]


def compile_for(
    sm: int,
    kernel: Any,
    flags: dict[str, bool],
    *,
    adapter: bool,
    bias: bool,
    softcap: float | None,
) -> dict[str, Any]:
    """Return registers a thread, spilled instructions, bytes of shared memory, and tensor core instructions."""

    def like(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    terms = [Term(like(T, H), like(V, H))] + [Term(like(T, RANK), like(V, RANK))] * adapter
    logits = Logits(tuple(terms), like(V) if bias else None, 1.0, softcap)
    constants = gpu.kernel_arguments(logits, gradient=kernel is gradient_kernel, sm=sm).constants
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    constants |= flags
    types = dict.fromkeys(kernel.arg_names, "*fp32") | dict.fromkeys(
        ("x", "w", "x2", "w2", "bias"), "*bf16"
    )
    types |= {"targets": "*i64"} | dict.fromkeys(("inverse_temperature", "softcap"), "fp32")
    types |= dict.fromkeys(("T", "V", "K", "K2", "splits", "tiles_per_split"), "i32")
    types |= {"out": "*bf16"} if kernel is gradient_kernel else {}
    types |= dict.fromkeys(constants, "constexpr")
    # As at a launch: pointers and sizes are divisible by 16.
    divisible = [n for n in kernel.arg_names if types[n].startswith("*") or n in ("V", "K", "K2")]
    source = ASTSource(
        kernel,
        {name: types[name] for name in kernel.arg_names},
        {(kernel.arg_names.index(name),): value for name, value in constants.items()},
        {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in divisible},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
    return _read_cubin(compiled.asm["cubin"]) | {
        "shared": compiled.metadata.shared,
        "block": [constants["BLOCK_M"], constants["BLOCK_N"], constants["BLOCK_K"]],
        "tensor_core": sorted(
            set(re.findall(r"(wgmma|tcgen05\.mma|mma\.sync)", compiled.asm["ptx"]))
        ),
    }


def _read_cubin(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = (
            subprocess.run(
                [TOOL, what, file.name], capture_output=True, text=True, check=True
            ).stdout
            for what in ("-res-usage", "-sass")
        )
    found = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    spills = len(re.findall(r"\b(?:STL|LDL)\b", code))
    return {"registers": found["REG"], "stack": found["STACK"] + found["LOCAL"], "spills": spills}


def main() -> None:
    for sm in map(int, sys.argv[1:]):
        for kernel, flags, heads in VARIANTS:
            for head in heads:
                found = compile_for(sm, kernel, flags, **HEADS[head])
                flag = ", ".join(f"{key}={value}" for key, value in flags.items())
                print(
                    json.dumps(
                        {"sm": sm, "kernel": f"{kernel.__name__} {flag}", "head": head} | found
                    ),
                    flush=True,
                )


if __name__ == "__main__":
    main()
