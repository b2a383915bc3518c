"""How a policy is built: dropouts off, adapters where asked for, and plain errors on every rank."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import MambaConfig

from spiral_mega.distributed.runtime import Runtime, start_runtime
from spiral_mega.errors import UserError
from spiral_mega.policy.fsdp.fsdp_policy import FsdpPolicy
from spiral_mega.policy.fsdp.sharded_model import build_model
from tests.policy.cases import Lab
from tests.policy.reference import gradients_of, load_model, make_sequences
from tests.support.configs import make_config
from tests.support.tiny_models import VOCAB, save_tiny_model


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with start_runtime() as runtime:
        yield runtime


def test_dropout_of_the_model_config_is_off(tmp_path: Path, runtime: Runtime) -> None:
    folder = save_tiny_model(tmp_path / "model", "llama", attention_dropout=0.5)
    sequences = make_sequences(folder, 4, seed=0)
    loss, _ = gradients_of(load_model(folder).eval(), sequences)
    noisy, _ = gradients_of(load_model(folder).train(), sequences)
    assert abs(noisy - loss) > 1e-4  # in training, transformers itself would drop
    policy = FsdpPolicy(make_config(folder), runtime)
    assert policy.model.training
    assert policy.update([sequences])["train/loss"] == pytest.approx(loss, abs=1e-6)


def test_attention_can_be_named(tmp_path: Path, runtime: Runtime) -> None:
    folder = save_tiny_model(tmp_path / "model")
    config = make_config(folder, policy={"attention": "tree_torch"})
    model = build_model(config.model, config.policy, runtime, seed=0)
    assert model.config._attn_implementation == "tree_torch"


@pytest.mark.parametrize("name", ["tree_varlen", "tree_flex"])
def test_an_attention_that_cannot_run_here_is_refused(
    name: str, tmp_path: Path, runtime: Runtime
) -> None:
    folder = save_tiny_model(tmp_path / "model")
    with pytest.raises(UserError, match=rf"policy\.attention is '{name}'.* GPU"):
        FsdpPolicy(make_config(folder, policy={"attention": name}), runtime)


def test_a_model_that_token_trees_cannot_follow_is_refused(
    tmp_path: Path, runtime: Runtime
) -> None:
    MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"Mamba.*token trees cannot follow"):
        FsdpPolicy(make_config(tmp_path), runtime)


def test_unknown_lora_target_names_the_layers_that_exist(tmp_path: Path, runtime: Runtime) -> None:
    folder = save_tiny_model(tmp_path / "model")
    config = make_config(
        folder, model={"path": str(folder), "lora": {"targets": ["q_proj", "qkv_proj", "w1"]}}
    )
    with pytest.raises(
        UserError, match=r"model\.lora\.targets names qkv_proj, w1, .*down_proj, gate_proj.*v_proj"
    ):
        FsdpPolicy(config, runtime)


def test_missing_weights_are_an_error_rather_than_random_numbers(
    tmp_path: Path, runtime: Runtime
) -> None:
    folder = save_tiny_model(tmp_path / "model", tied=True)
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"no lm_head\.weight in its files"):
        FsdpPolicy(make_config(folder), runtime)


def test_adapters_start_from_the_seed_alone(tmp_path: Path, runtime: Runtime) -> None:
    folder = save_tiny_model(tmp_path / "model")

    def adapters(seed: int, noise: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(noise)
        config = make_config(
            folder, run={"seed": seed}, model={"path": str(folder), "lora": {"rank": 2}}
        )
        policy = FsdpPolicy(config, runtime)
        return {
            n: p.full_tensor().detach()
            for n, p in policy.model.named_parameters()
            if p.requires_grad
        }

    first, again, other = adapters(1, noise=5), adapters(1, noise=6), adapters(2, noise=5)
    assert all(".lora_" in name for name in first)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert all(
        bool((p != 0).any()) == ("lora_A" in name) for name, p in first.items()
    )  # B = 0: no change at first
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_building_leaves_the_random_state_alone(tmp_path: Path, runtime: Runtime) -> None:
    folder = save_tiny_model(tmp_path / "model")
    before = torch.get_rng_state()
    FsdpPolicy(make_config(folder, model={"path": str(folder), "lora": {"rank": 2}}), runtime)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("world_size", [2])
def test_what_only_the_reading_rank_notices_is_told_on_every_rank(
    lab: Lab, world_size: int
) -> None:
    texts = [rank["error: broken"] for rank in lab.results[world_size]]
    assert texts == texts[:1] * world_size
    assert str(lab.broken_model()) in texts[0]
    assert "model.path" in texts[0]


def test_a_model_path_that_leads_nowhere_is_told_on_every_rank(lab: Lab) -> None:
    for rank in lab.results[2]:
        assert rank["error: absent"].startswith(
            f"model.path '{lab.folder / 'absent'}' does not lead to a model: name"
        )
