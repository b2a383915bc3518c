"""A sync leaves the policy's own weights as they are, and detects an engine that did not get them."""

import pytest
import torch
from safetensors.torch import load_file

from spiral_mega.policy.fsdp.fsdp_policy import FsdpPolicy
from spiral_mega.rollout import build_engine
from spiral_mega.rollout.sync import SyncError, WeightSync
from tests.support.configs import make_config
from tests.support.tiny_models import END_ID, save_tiny_model

PROMPT = [2, 10, 11, 3]


@pytest.fixture(params=["float32", "bfloat16"])
def parts(request, runtime, tmp_path):
    """A policy, an engine without its weights, and the sync between them, by compute type."""
    folder = tmp_path / "model"
    save_tiny_model(folder, "qwen3", tied=False)
    config = make_config(
        folder, policy={"param_dtype": request.param}, rollout={"sync.max_logprob_gap": 0.1}
    )
    policy = FsdpPolicy(config, runtime)
    engine = build_engine(config, frozenset([END_ID]), runtime)
    return policy, engine, WeightSync(policy, engine, PROMPT, config, runtime), folder


def test_weights_after_a_sync_are_the_float32_ones_to_the_bit(parts):
    """FSDP keeps the root's weights in compute type after a forward without backward; those must not be streamed."""
    policy, _, sync, folder = parts
    gap = sync()["sync/logprob_gap"]
    assert gap < 0.1
    saved, streamed = load_file(folder / "model.safetensors"), dict(policy.weights())
    assert saved.keys() == streamed.keys()
    for name, tensor in streamed.items():
        assert tensor.dtype == torch.float32, name
        assert torch.equal(tensor, saved[name]), name


def test_an_engine_without_the_weights_is_an_error(parts):
    _, engine, sync, _ = parts
    engine.load_weights = lambda weights: list(weights)
    with pytest.raises(SyncError, match=r"rollout\.sync\.max_logprob_gap"):
        sync()


def test_weights_that_are_not_numbers_are_an_error(parts):
    _, engine, sync, _ = parts
    load = engine.load_weights
    engine.load_weights = lambda weights: load(
        (name, torch.full_like(w, float("nan"))) for name, w in weights
    )
    with pytest.raises((SyncError, RuntimeError)):
        sync()
