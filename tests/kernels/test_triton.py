"""The Triton kernels without a GPU: interpreted, against whole logits in float64, and compiled for three GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.kernels.cases import (
    EXTREME,
    OUTPUTS,
    Tensors,
    assert_accurate,
    plain_logits,
    rms_errors,
    truth,
)
from tests.kernels.triton_interpreter_job import CASES
from tests.support.ranks import ROOT

pytest.importorskip("triton")

# Bytes of a multiprocessor's shared memory that one program may use, by compute capability
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
TENSOR_CORE = {80: "mma.sync", 90: "wgmma", 100: "tcgen05.mma"}


def _run(*command: str, **environment: str) -> str:
    """Run in a process of its own: Triton decides on import whether it interprets."""
    job = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert job.returncode == 0, job.stdout + job.stderr
    return job.stdout


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensors]:
    path = tmp_path_factory.mktemp("triton") / "results.pt"
    _run("tests.kernels.triton_interpreter_job", str(path), TRITON_INTERPRET="1")
    return torch.load(path)


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    printed = _run(
        "tests.kernels.triton_compile_job", *map(str, SHARED_LIMIT), TRITON_INTERPRET="0"
    )
    return [json.loads(line) for line in printed.splitlines()]


@pytest.mark.parametrize("name", [name for name in CASES if name not in EXTREME])
def test_outputs_and_gradients_are_those_of_whole_float64_logits(
    name: str, interpreted: dict[str, Tensors]
) -> None:
    case = CASES[name]
    tensors, found = case.tensors(), interpreted[name]
    expected = truth(tensors, case)
    if case.dtype == torch.float32:
        assert_accurate(found, expected)
    else:  # outputs as if the inputs were float32; gradients are rounded to theirs, by the interpreter towards zero
        assert_accurate({k: found[k] for k in OUTPUTS}, {k: expected[k] for k in OUTPUTS})
        ours, naive = rms_errors(found, expected), rms_errors(truth(tensors, case, None), expected)
        assert all(ours[key] <= 1.2 * naive[key] + 1e-6 for key in expected), (ours, naive)


@pytest.mark.parametrize("name", EXTREME)
def test_huge_logits_overflow_nothing(name: str, interpreted: dict[str, Tensors]) -> None:
    case = EXTREME[name]
    tensors, found = case.tensors(), interpreted[name]
    expected = truth(tensors, case)
    largest = float(plain_logits(tensors, case).nan_to_num(neginf=0).abs().max())
    for key in OUTPUTS:
        assert float((found[key].double() - expected[key]).abs().max()) <= 1e-6 * largest, key
    assert all(found[key].isfinite().all() for key in found)


def test_rows_without_any_logit_are_nan_and_targets_outside_the_vocabulary_impossible(
    interpreted: dict[str, Tensors],
) -> None:
    found = interpreted["impossible rows"]
    assert found["lost"].isnan().all()
    assert found["lost logsumexp"].isneginf().all()
    assert found["outside"].isneginf().nonzero()[:, 0].tolist() == [3]


def test_a_shard_without_entries_contributes_nothing(interpreted: dict[str, Tensors]) -> None:
    found = interpreted["empty shard"]
    assert found["max"].isfinite().all()
    assert not found["sum"].any()
    assert not found["dot"].any()
    assert found["target"].isneginf().all()


def test_the_same_input_gives_the_same_bits(interpreted: dict[str, Tensors]) -> None:
    first, second = interpreted["again 0"], interpreted["again 1"]
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_no_compiled_kernel_spills_a_register(compiled: list[dict[str, Any]]) -> None:
    assert {kernel["sm"] for kernel in compiled} == SHARED_LIMIT.keys()
    spilling = [kernel for kernel in compiled if kernel["spills"] or kernel["stack"]]
    assert not spilling


def test_every_compiled_kernel_fits_its_multiprocessor_and_uses_its_tensor_cores(
    compiled: list[dict[str, Any]],
) -> None:
    for kernel in compiled:
        assert kernel["shared"] <= SHARED_LIMIT[kernel["sm"]], kernel
        assert TENSOR_CORE[kernel["sm"]] in kernel["tensor_core"], kernel
