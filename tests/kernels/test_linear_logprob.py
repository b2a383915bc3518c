"""The fused head on CPU, in tiles and from whole logits, against whole logits in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from spiral_mega.kernels import cpu, dispatch, linear_logprob
from tests.kernels.cases import (
    EXTREME,
    HALF,
    INPUTS,
    OUTPUTS,
    RAGGED,
    Case,
    arguments,
    assert_accurate,
    computed,
    leaves,
    options,
    plain_logits,
    rms_errors,
    truth,
)
from tests.support.largest_tensor import LargestTensor

BACKENDS = ["reference", "cpu"]


@pytest.fixture(params=[cpu.MAX_SAVED_LOGITS, 0], ids=["saved", "recomputed"])
def small_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use many tiles in both directions, the last ones ragged; save logits for the backward pass, or recompute them."""
    monkeypatch.setattr(cpu, "MAX_SAVED_LOGITS", request.param)
    monkeypatch.setattr(cpu, "TILE_ROWS", 24)
    monkeypatch.setattr(cpu, "TILE_ELEMENTS", 24 * 100)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", RAGGED)
def test_outputs_and_gradients_are_those_of_whole_float64_logits(name: str, backend: str) -> None:
    case = RAGGED[name]
    tensors = case.tensors()
    assert_accurate(computed(tensors, case, backend=backend), truth(tensors, case))


@pytest.mark.parametrize("backend", BACKENDS)
def test_float32_errors_stay_small_over_a_large_vocabulary(backend: str) -> None:
    case = Case(192, 256, 50_000, scale=4.0)
    tensors = case.tensors()
    assert_accurate(computed(tensors, case, backend=backend), truth(tensors, case))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", EXTREME)
def test_huge_logits_overflow_nothing(name: str, backend: str) -> None:
    case = EXTREME[name]
    tensors = case.tensors()
    found, expected = computed(tensors, case, backend=backend), truth(tensors, case)
    largest = float(plain_logits(tensors, case).nan_to_num(neginf=0).abs().max())
    for key in OUTPUTS:  # a logit's own rounding is what float32 cannot avoid
        assert float((found[key].double() - expected[key]).abs().max()) <= 1e-6 * largest, key
    assert all(torch.isfinite(found[key][torch.isfinite(expected[key])]).all() for key in found)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", HALF)
def test_half_precision_is_no_worse_than_the_models_own_logits_in_float32(
    name: str, backend: str
) -> None:
    case = HALF[name]
    tensors = case.tensors()
    expected = truth(tensors, case)
    ours, naive = (
        rms_errors(computed(tensors, case, backend=backend), expected),
        rms_errors(truth(tensors, case, None), expected),
    )
    assert all(ours[key] <= 1.1 * naive[key] + 1e-6 for key in expected), (ours, naive)


def test_sums_over_many_blocks_of_tokens_are_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "TILE_ROWS", 8)
    case = Case(800, 32, 60, dtype=torch.bfloat16)
    tensors = case.tensors()
    tensors["upstream"] = tensors["upstream"].abs()
    expected = truth(tensors, case)
    ours, naive = (
        rms_errors(found, expected)
        for found in (computed(tensors, case, backend="cpu"), truth(tensors, case, None))
    )
    assert ours["weight"] <= 1.1 * naive["weight"]


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("output", range(3), ids=OUTPUTS)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_gradients_pass_gradcheck(backend: str, output: int, softcap: float | None) -> None:
    case = Case(5, 7, 230, dtype=torch.float64, bias=True, rank=2, softcap=softcap, temperature=1.4)
    tensors = case.tensors()

    def function(*inputs: torch.Tensor) -> torch.Tensor:
        given = tensors | dict(zip(INPUTS, inputs, strict=True))
        result = linear_logprob(**arguments(given), **options(case), backend=backend)[output]
        assert result is not None
        return result

    assert torch.autograd.gradcheck(
        function, [tensors[name].requires_grad_() for name in INPUTS], fast_mode=True
    )


@pytest.mark.usefixtures("small_tiles")
def test_only_the_gradients_that_are_needed_are_computed() -> None:
    case = RAGGED["adapter"]
    tensors = case.tensors()
    asked = {"hidden", "adapter_weight"}
    given = {
        n: t.clone().requires_grad_(n in asked) if n in INPUTS else t for n, t in tensors.items()
    }
    outputs = linear_logprob(**arguments(given), backend="cpu")
    torch.stack([o for o in outputs if o is not None]).mul(
        tensors["upstream"].float()
    ).sum().backward()
    expected = truth(tensors, case)
    for name in ("hidden", "weight", "adapter_input", "adapter_weight"):
        if name in asked:
            torch.testing.assert_close(
                given[name].grad, expected[name].float(), rtol=1e-4, atol=1e-5
            )
        else:
            assert given[name].grad is None


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_without_any_logit_are_nan_and_leave_the_others_alone(backend: str) -> None:
    case = replace(RAGGED["ragged"], bias=False)
    tensors = case.tensors()
    tensors["hidden"] = tensors["hidden"].abs()
    lost = {"bias": torch.full((case.V,), -torch.inf)}
    outputs = linear_logprob(**arguments(tensors | lost), backend=backend)
    assert outputs.logprob.isnan().all()
    assert outputs.logsumexp.isneginf().all()
    tensors["weight"][0] = -torch.inf  # entry 0 is impossible in every row but the last
    tensors["hidden"][-1] = torch.nan
    outputs = linear_logprob(**arguments(tensors), backend=backend)
    without = {"weight": tensors["weight"][1:], "targets": (tensors["targets"] - 1).clamp(min=0)}
    expected = linear_logprob(**arguments(tensors | without), backend="reference")
    possible = tensors["targets"][:-1] > 0
    for found, right in zip(outputs, expected, strict=True):
        assert found is not None
        assert right is not None
        assert found[-1].isnan()
        torch.testing.assert_close(found[:-1][possible], right[:-1][possible])


def test_rows_without_an_upstream_gradient_are_left_out_of_the_backward_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = RAGGED["idle rows"]
    tensors = case.tensors()
    seen: list[int] = []
    original = cpu.add_gradients

    def watched(gradients: Any, logits: Any, upstream: Any) -> None:
        seen.append(logits.shape[0])
        original(gradients, logits, upstream)

    monkeypatch.setattr(cpu, "add_gradients", watched)
    found = computed(tensors, case, backend="cpu")
    busy = (tensors["upstream"] != 0).any(0)
    assert seen == [int(busy.sum())]
    assert seen[0] < case.T / 2
    assert not found["hidden"][~busy].any()
    assert found["hidden"][busy].any(1).all()


def test_a_nan_row_without_an_upstream_gradient_affects_no_gradient() -> None:
    case = RAGGED["idle rows"]
    tensors = case.tensors()
    idle = int((tensors["upstream"] == 0).all(0).nonzero()[0])
    expected = computed(tensors, case, backend="cpu")
    tensors["hidden"][idle] = torch.nan
    found = computed(tensors, case, backend="cpu")
    assert found["logprob"][idle].isnan()
    assert all(torch.equal(found[key], expected[key]) for key in INPUTS)


def test_the_logits_are_never_whole_where_they_are_many() -> None:
    case = Case(2048, 16, 16_384)
    tensors = case.tensors()
    with LargestTensor() as watch:
        computed(tensors, case)
    assert watch.elements <= cpu.TILE_ELEMENTS < case.T * case.V / 10


def test_a_few_logits_are_saved_if_there_will_be_a_backward_pass_and_only_then() -> None:
    case = Case(2048, 16, cpu.MAX_SAVED_LOGITS // 2048)
    tensors = case.tensors()
    largest = {}
    for name in ("gradient", "no gradient asked for", "no_grad"):
        given = arguments(leaves(tensors) if name != "no gradient asked for" else tensors)
        with LargestTensor() as watch, torch.set_grad_enabled(name != "no_grad"):
            linear_logprob(**given)
        largest[name] = watch.elements
    few = cpu.TILE_ELEMENTS
    assert largest == {"gradient": case.T * case.V, "no gradient asked for": few, "no_grad": few}


def test_saved_logits_give_the_same_bits_as_recomputed_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = replace(RAGGED["adapter"], softcap=5.0, temperature=1.3)
    found = []
    for elements in (cpu.MAX_SAVED_LOGITS, 0):
        monkeypatch.setattr(cpu, "MAX_SAVED_LOGITS", elements)
        found.append(computed(case.tensors(), case, backend="cpu"))
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


def test_a_graph_that_is_retained_gives_the_same_gradients_again() -> None:
    case = RAGGED["adapter"]
    tensors = leaves(case.tensors())
    loss = linear_logprob(**arguments(tensors), backend="cpu").logprob.sum()
    inputs = [tensors[name] for name in INPUTS if name in tensors]
    first, second = (torch.autograd.grad(loss, inputs, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.usefixtures("small_tiles")
def test_the_same_input_gives_the_same_bits() -> None:
    case = replace(RAGGED["ragged"], dtype=torch.bfloat16)
    first, second = (computed(case.tensors(), case, backend="cpu") for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("backend", BACKENDS)
def test_entropy_is_left_out_unless_asked_for(backend: str) -> None:
    case = RAGGED["temperature"]
    given = arguments(case.tensors())
    without = linear_logprob(**given, **options(case), with_entropy=False, backend=backend)
    assert without.entropy is None
    torch.testing.assert_close(
        without[:2], linear_logprob(**given, **options(case), backend=backend)[:2]
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_of_the_vocabulary_counts_for_nothing(backend: str) -> None:
    case = RAGGED["adapter"]
    tensors = case.tensors()
    padding = torch.full((19, case.H), 50.0)
    padded = tensors | {
        "weight": torch.cat([tensors["weight"], padding]),
        "adapter_weight": torch.cat([tensors["adapter_weight"], padding[:, : case.rank]]),
    }
    found = computed(padded, case, vocab_size=case.V, backend=backend)
    for key, right in computed(tensors, case, backend=backend).items():
        torch.testing.assert_close(found[key][: len(right)], right)
        assert not found[key][len(right) :].any()


def test_a_target_outside_the_vocabulary_is_impossible() -> None:
    case = RAGGED["temperature"]
    tensors = case.tensors()
    tensors["targets"][3], tensors["targets"][5] = case.V, -100
    logprob = linear_logprob(**arguments(tensors), backend="cpu").logprob
    assert logprob.isneginf().nonzero()[:, 0].tolist() == [3, 5]


def test_small_inputs_take_whole_logits_and_large_ones_tiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen: list[str] = []
    monkeypatch.setattr(
        dispatch.whole_logits, "linear_logprob", lambda *_: chosen.append("reference")
    )
    statistics = cpu.statistics
    monkeypatch.setattr(cpu, "statistics", lambda *a: chosen.append("cpu") or statistics(*a))
    for case in (Case(8, 8, 1000), Case(2000, 8, 1000), Case(8, 2000, 1000)):
        linear_logprob(**arguments(case.tensors()))
    assert chosen == ["reference", "cpu", "cpu"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(10, 7)}, "shapes"),
        ({"targets": torch.zeros(4, dtype=torch.long)}, "targets"),
        ({"targets": torch.zeros(3)}, "targets"),
        ({"bias": torch.zeros(9)}, "bias"),
        ({"bias": torch.zeros(10, dtype=torch.float64)}, "floating-point"),
        ({"adapter": (torch.zeros(2, 4), torch.zeros(10, 4))}, "adapter"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"softcap": -1.0}, "softcap"),
        ({"backend": "numpy"}, "backend"),
    ],
)
def test_invalid_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    right = {
        "hidden": torch.zeros(3, 8),
        "weight": torch.zeros(10, 8),
        "targets": torch.zeros(3, dtype=torch.long),
    }
    linear_logprob(**right)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        linear_logprob(**(right | change))  # type: ignore[arg-type]
