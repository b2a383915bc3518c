"""The KL penalty on megatron-core is that of plain models, with adapters off and with a second model."""

import pytest

from tests.policy.reference import load_model
from tests.policy.test_reference import Case, plain_gradient
from tests.policy_megatron.cases import KL, Lab
from tests.policy_megatron.expected import by_checkpoint_name
from tests.policy_megatron.test_gradients import largest_difference
from tests.policy_megatron.test_lora import by_file_name

pytestmark = pytest.mark.megatron


@pytest.mark.parametrize("name", KL)
def test_the_gradient_with_a_kl_penalty_is_that_of_plain_models(lab: Lab, name: str) -> None:
    _, case = KL[name]
    folder, sequences = lab.model("qwen3 tied"), lab.batches("qwen3 tied")[0]
    model = load_model(folder, case.lora, lab.kl_adapters(case))
    reference = load_model(lab.other_model() if case.other else folder)
    named = by_file_name if case.lora else by_checkpoint_name
    expected = named(plain_gradient(model, reference, case, sequences))
    largest = max(float(g.abs().max()) for g in expected.values())
    without = named(plain_gradient(model, reference, Case(), sequences))
    assert largest_difference(expected, without) > 0.05 * largest, "the terms matter"
    for rank in lab.results[2]:
        found = rank[f"KL: {name}"]["all"]
        assert largest_difference(found["gradients"], expected) < 4e-6 * max(largest, 0.25)
        assert found["metrics"]["kl/reference"] > 0.01
