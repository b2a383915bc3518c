"""What is saved is what transformers loads: weights, types, tokenizer, generation config; whole or not at all."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from spiral_mega.config import ModelConfig
from spiral_mega.distributed.runtime import start_runtime
from spiral_mega.models import export
from spiral_mega.models.export import save_pretrained
from tests.policy.cases import UPDATES, Lab
from tests.policy.reference import load_model
from tests.support.tiny_models import END_ID, save_tiny_model, tiny_model

TOKENS = torch.arange(10, 30)[None]


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    with start_runtime():
        yield


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


def streamed(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name, parameter.detach()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", UPDATES)
def test_transformers_loads_the_model_that_was_trained(
    lab: Lab, name: str, world_size: int
) -> None:
    base, lora = UPDATES[name]
    trained = load_model(lab.model(base), lora)
    trained.load_state_dict(
        lab.results[world_size][0][f"updates: {name}"]["after"][-1], strict=False
    )
    saved, info = AutoModelForCausalLM.from_pretrained(
        lab.folder / "exports" / f"{name} {world_size}", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    torch.testing.assert_close(logits(saved), logits(trained), rtol=0, atol=1e-5)
    assert (
        logits(saved) - logits(load_model(lab.model(base)))
    ).abs().max() > 1e-3  # it was trained at all


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_head_stays_tied_unless_an_adapter_moved_it(lab: Lab, world_size: int) -> None:
    tied = {}
    for name in UPDATES:
        folder = lab.folder / "exports" / f"{name} {world_size}"
        with safe_open(folder / "model.safetensors", "pt") as file:
            has_head = "lm_head.weight" in file.keys()  # noqa: SIM118 (not a dict)
        tied[name] = json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
        assert has_head != tied[name]
    assert tied == {"tied": True, "untied": False, "LoRA, tied": False, "LoRA, untied": False}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_files_of_bounded_size_in_the_type_of_the_original(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    source = save_tiny_model(tmp_path / "source", "llama", tied=False, dtype=dtype)
    monkeypatch.setattr(export, "MAX_FILE_BYTES", 40_000)
    other = tiny_model("llama", tied=False, seed=5)
    save_pretrained(streamed(other), ModelConfig(path=str(source)), tmp_path / "model")
    files = sorted((tmp_path / "model").glob("*.safetensors"))
    assert len(files) > 3
    assert all(file.stat().st_size < 40_000 + 4_000 for file in files)  # and a header
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {file.name for file in files}
    assert index["weight_map"].keys() == dict(streamed(other)).keys()
    assert (
        index["metadata"]["total_size"]
        == sum(p.numel() for p in other.parameters()) * dtype.itemsize
    )
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    assert saved.dtype == dtype
    expected = {name: tensor.to(dtype) for name, tensor in streamed(other)}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in streamed(saved))


def test_tokenizer_template_and_generation_config_travel_along(tmp_path: Path) -> None:
    source = save_tiny_model(tmp_path / "source")
    save_pretrained(
        streamed(tiny_model("qwen3", tied=True)), ModelConfig(path=str(source)), tmp_path / "model"
    )
    tokenizer, original = (
        AutoTokenizer.from_pretrained(tmp_path / name) for name in ("model", "source")
    )
    chat = [{"role": "user", "content": "w1 w2"}]
    shown = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert shown == "<|user|> w1 w2 <|assistant|>"
    assert tokenizer(shown).input_ids == original(shown).input_ids
    assert GenerationConfig.from_pretrained(tmp_path / "model").eos_token_id == [END_ID]


def test_a_model_without_a_generation_config_is_saved_too(tmp_path: Path) -> None:
    source = save_tiny_model(tmp_path / "source", generation_config=False)
    model = tiny_model("qwen3", tied=True, seed=5)
    save_pretrained(streamed(model), ModelConfig(path=str(source)), tmp_path / "model")
    assert not (tmp_path / "model" / "generation_config.json").exists()
    torch.testing.assert_close(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "model")), logits(model)
    )


def test_a_tokenizer_of_its_own_folder_is_the_one_saved(tmp_path: Path) -> None:
    source = save_tiny_model(tmp_path / "source")
    (tmp_path / "tokenizer").mkdir()
    for file in [*source.glob("*token*"), *source.glob("*.jinja")]:
        file.rename(tmp_path / "tokenizer" / file.name)
    config = ModelConfig(path=str(source), tokenizer=str(tmp_path / "tokenizer"))
    save_pretrained(streamed(tiny_model("qwen3", tied=True)), config, tmp_path / "model")
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("w0 w3").input_ids == [6, 9]


def test_a_save_that_breaks_off_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = ModelConfig(path=str(save_tiny_model(tmp_path / "source")))
    monkeypatch.setattr(export, "MAX_FILE_BYTES", 10_000)

    def breaking(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(streamed(model))[:6]
        raise KeyboardInterrupt

    first, second = (tiny_model("qwen3", tied=True, seed=seed) for seed in (1, 2))
    folder = tmp_path / "model"
    with pytest.raises(KeyboardInterrupt):
        save_pretrained(breaking(first), source, folder)
    assert not folder.exists()
    save_pretrained(streamed(first), source, folder)
    with pytest.raises(KeyboardInterrupt):
        save_pretrained(breaking(second), source, folder)
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(folder)), logits(first))
    save_pretrained(streamed(second), source, folder)
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(folder)), logits(second))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "source"]


def test_an_older_model_of_more_files_leaves_none_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = ModelConfig(path=str(save_tiny_model(tmp_path / "source")))
    model = tiny_model("qwen3", tied=True)
    monkeypatch.setattr(export, "MAX_FILE_BYTES", 10_000)
    save_pretrained(streamed(model), source, tmp_path / "model")
    monkeypatch.undo()
    save_pretrained(streamed(model), source, tmp_path / "model")
    assert [path.name for path in (tmp_path / "model").glob("*.safetensors*")] == [
        "model.safetensors"
    ]
