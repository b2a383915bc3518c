"""The Triton kernels on a GPU: against whole logits in float64, and compared with the matrix products alone."""

from __future__ import annotations

import statistics

import pytest
import torch

from benchmarks.linear_logprob import measure
from spiral_mega.kernels import linear_logprob
from tests.kernels.cases import (
    EXTREME,
    HALF,
    OUTPUTS,
    RAGGED,
    Case,
    Tensors,
    arguments,
    assert_accurate,
    computed,
    rms_errors,
    truth,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
LARGE = {
    "float32, large": Case(700, 1024, 20_000),
    "bfloat16, large": Case(2000, 4096, 151_936, dtype=torch.bfloat16, idle=0.5),
    "bfloat16, large, adapter": Case(
        1500, 2048, 151_936, dtype=torch.bfloat16, rank=32, temperature=0.7
    ),
}


def on_gpu(tensors: Tensors) -> Tensors:
    return {name: tensor.cuda() for name, tensor in tensors.items()}


@pytest.mark.parametrize("name", RAGGED | HALF | LARGE)
def test_outputs_and_gradients_are_those_of_whole_float64_logits(name: str) -> None:
    case = (RAGGED | HALF | LARGE)[name]
    tensors = on_gpu(case.tensors())
    found, expected = computed(tensors, case), truth(tensors, case)
    if case.dtype == torch.float32:
        assert_accurate(found, expected)
    else:
        assert_accurate({k: found[k] for k in OUTPUTS}, {k: expected[k] for k in OUTPUTS})
        ours, naive = rms_errors(found, expected), rms_errors(truth(tensors, case, None), expected)
        assert all(ours[key] <= 1.1 * naive[key] + 1e-6 for key in expected), (ours, naive)


@pytest.mark.parametrize("name", EXTREME)
def test_huge_logits_overflow_nothing(name: str) -> None:
    case = EXTREME[name]
    found = computed(on_gpu(case.tensors()), case)
    assert all(found[key].isfinite().all() for key in found)


def test_the_same_input_gives_the_same_bits() -> None:
    case = LARGE["bfloat16, large, adapter"]
    tensors = on_gpu(case.tensors())
    first, second = computed(tensors, case), computed(tensors, case)
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_the_logits_are_never_whole() -> None:
    case = Case(16_384, 256, 151_936, dtype=torch.bfloat16)
    tensors = on_gpu(case.tensors())
    tensors["weight"].requires_grad_()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    linear_logprob(**arguments(tensors)).logprob.sum().backward()
    gradient = tensors["weight"].numel() * 2
    assert torch.cuda.max_memory_allocated() - before - gradient < case.T * case.V * 4 / 20


@pytest.mark.parametrize(
    ("hidden", "dtype"), [(1024, torch.bfloat16), (4096, torch.bfloat16), (1024, torch.float32)]
)
def test_time_and_memory_against_the_four_products_alone(
    hidden: int, dtype: torch.dtype, capsys: pytest.CaptureFixture[str]
) -> None:
    """Print the ratio of times, medians of alternating rounds; assert memory, which does not depend on load."""
    tokens, vocab = 16_384, 151_936
    rounds = [
        {name: measure(name, tokens, hidden, vocab, dtype, "cuda") for name in ("floor", "ours")}
        for _ in range(5)
    ]
    wall = {
        name: statistics.median(each[name]["wall"] for each in rounds) for name in ("floor", "ours")
    }
    with capsys.disabled():
        print(f"\n{torch.cuda.get_device_name()}, T={tokens} H={hidden} V={vocab} {dtype}: "
              f"{wall['ours']:.4f} s, {wall['ours'] / wall['floor']:.2f} x the matrix products alone")  # fmt: skip
    assert max(each["ours"]["memory"] for each in rounds) * 2**20 < tokens * vocab * 4 / 20
