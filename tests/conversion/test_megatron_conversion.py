"""Checkpoints on megatron-core, ours and its own, become Hugging Face models of the same bits, and the other way."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from spiral_mega.conversion import convert
from spiral_mega.errors import UserError
from tests.support.ranks import run_ranks
from tests.support.tiny_models import save_tiny_model

pytestmark = pytest.mark.megatron

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
LORA = {"rank": 4, "alpha": 6}
MODELS: dict[str, tuple[Any, bool]] = {
    "qwen3": ("qwen3", True), "llama": ("llama", False), "qwen2": ("qwen2", True), "experts": ("qwen3_moe", False)
}  # fmt: skip
TP2, PP2, EP2, ALONE = {"tensor_parallel": 2}, {"pipeline_parallel": 2}, {"expert_parallel": 2}, {}
# Model and layout. "experts" in the order of megatron-core's own names, which are numbered; ours are stacked.
SAVED = {"qwen3": TP2, "llama": PP2, "qwen2": TP2, "experts": EP2}
LOADED = {
    "qwen3, TP2": TP2,
    "qwen3, TP1": ALONE,
    "llama, TP2": TP2,
    "qwen2, PP2": PP2,
    "experts, EP2": EP2,
}
TRAINED: dict[str, tuple[str, Any, Any]] = {
    "TP2, tied": ("qwen3", TP2, None),
    "PP2": ("llama", PP2, None),
    "two replicas": ("qwen3", ALONE, None),
    "EP2": ("experts", EP2, None),
    "LoRA, TP2": ("qwen3", TP2, LORA),
}
RESTORED = {"qwen3, trainer's": TP2, "experts, trainer's": EP2}
Tensors = dict[str, torch.Tensor]


class Lab:
    """Models and checkpoints in `folder`; what policies had when they were saved, and what loads brought."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        models = {
            name: (self.base(name), layout, self.saved(name)) for name, layout in SAVED.items()
        }
        policies = {
            name: (self.base(model), layout, lora, folder / name)
            for name, (model, layout, lora) in TRAINED.items()
        }
        self.weights: dict[str, Tensors] = run_ranks(
            2, "tests.conversion.megatron_jobs:save", (models, policies)
        )[0]
        for name in MODELS:
            convert(self.base(name), folder / f"{name} torch_dist", "torch_dist")
            convert(self.base(name), folder / f"{name} dcp", "dcp-megatron")
        loads, restored = (
            {
                name: (self.other(of(name)), layout, folder / f"{of(name)} {format_}")
                for name, layout in cases.items()
            }
            for cases, format_ in ((LOADED, "torch_dist"), (RESTORED, "dcp"))
        )
        self.loaded = run_ranks(
            2, "tests.conversion.megatron_jobs:load_converted", (loads, restored)
        )

    def base(self, name: str) -> Path:
        return self._model(name, self.folder / f"{name} base", 0)

    def other(self, name: str) -> Path:
        """A model of other weights, into which is loaded."""
        return self._model(name, self.folder / f"{name} other", 8)

    def _model(self, name: str, path: Path, seed: int) -> Path:
        family, tied = MODELS[name]
        return (
            path if path.exists() else save_tiny_model(path, family, tied=tied, seed=seed, **HEADS)
        )

    def saved(self, name: str) -> Path:
        return self.folder / "by megatron" / name

    def checkpoint(self, name: str) -> Path:
        return self.folder / name / "step_000001"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("megatron"))


def of(case: str) -> str:
    return case.partition(",")[0]


def assert_same_bits(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("name", SAVED)
def test_what_megatron_core_saved_becomes_the_model_it_was_made_of(
    lab: Lab, name: str, tmp_path: Path
) -> None:
    done = convert(lab.saved(name), tmp_path / "model", "hf", base=str(lab.base(name)), verify=True)
    assert_same_bits(
        *(
            load_file(folder / "model.safetensors")
            for folder in (tmp_path / "model", lab.base(name))
        )
    )
    # Megatron's vocabulary is padded where two ranks share it, which is reported.
    assert ("embedding.word_embeddings.weight: 1 rows" in done[0]) == (SAVED[name] == TP2)
    assert (tmp_path / "model" / "tokenizer.json").exists()


@pytest.mark.parametrize("name", [*LOADED, *RESTORED])
def test_megatron_core_and_the_trainer_load_what_was_converted(lab: Lab, name: str) -> None:
    expected = load_file(lab.base(of(name)) / "model.safetensors")
    expected.setdefault("lm_head.weight", expected["model.embed_tokens.weight"])
    for rank in lab.loaded:
        assert_same_bits(rank[name], expected)


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back_gives_the_same_tensors_to_the_bit(
    lab: Lab, name: str, tmp_path: Path
) -> None:
    for format_ in ("torch_dist", "dcp"):
        origin = lab.folder / f"{name} {format_}"
        convert(origin, tmp_path / format_, "hf", base=str(lab.base(name)))
        assert_same_bits(
            *(
                load_file(folder / "model.safetensors")
                for folder in (tmp_path / format_, lab.base(name))
            )
        )


@pytest.mark.parametrize("name", [name for name, (_, _, lora) in TRAINED.items() if lora is None])
def test_transformers_loads_a_checkpoint_of_the_trainer_with_the_same_bits(
    lab: Lab, name: str, tmp_path: Path
) -> None:
    convert(lab.checkpoint(name), tmp_path / "model", "hf", verify=True)
    _, found = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    written = load_file(tmp_path / "model" / "model.safetensors")
    written.setdefault("lm_head.weight", written["model.embed_tokens.weight"])
    assert_same_bits(written, lab.weights[name])


def test_peft_loads_a_checkpoint_of_adapters(lab: Lab, tmp_path: Path) -> None:
    name, tokens = "LoRA, TP2", torch.arange(10, 40)[None]
    convert(lab.checkpoint(name), tmp_path / "adapter", "peft", verify=True)
    convert(lab.checkpoint(name), tmp_path / "merged", "hf", verify=True)
    base = AutoModelForCausalLM.from_pretrained(lab.base(TRAINED[name][0]))
    with torch.no_grad():
        plain = base(tokens).logits
        adapted = PeftModel.from_pretrained(base, tmp_path / "adapter")(tokens).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(tokens).logits
        trained = AutoModelForCausalLM.from_pretrained(
            lab.base(TRAINED[name][0]), tie_word_embeddings=False
        )
        trained.load_state_dict(lab.weights[name])
        expected = trained(tokens).logits
    assert (plain - expected).abs().max() > 0.1
    for logits in (adapted, merged):
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


def test_a_checkpoint_of_another_model_is_refused_by_key(lab: Lab, tmp_path: Path) -> None:
    deeper = save_tiny_model(tmp_path / "deeper", num_hidden_layers=3, **HEADS)
    wider = save_tiny_model(tmp_path / "wider", intermediate_size=128, **HEADS)
    smaller = save_tiny_model(tmp_path / "smaller", **HEADS)
    settings = json.loads((smaller / "config.json").read_text())
    (smaller / "config.json").write_text(json.dumps(settings | {"vocab_size": 103}))
    untied = save_tiny_model(tmp_path / "untied", tied=False, **HEADS)
    other = save_tiny_model(tmp_path / "other", "llama", tied=True, **HEADS)
    for base, message in (
        (deeper, r"linear_qkv.layer_norm_weight is \(2, 64\), by the config \(3, 64\)"),
        (
            wider,
            r"decoder.layers.mlp.linear_fc1.weight is \(2, 192, 64\), by the config \(2, 256, 64\)",
        ),
        (smaller, r"embedding.word_embeddings.weight is \(102, 64\), by the config \(103, 64\)"),
        (untied, "it has no output_layer.weight"),
        (
            other,
            "it has decoder.layers.self_attention.k_layernorm.weight, .* which the model does not know",
        ),
    ):
        with pytest.raises(UserError, match=message):
            convert(lab.saved("qwen3"), tmp_path / "target", "hf", base=str(base))
    with pytest.raises(UserError, match="does not name the model"):
        convert(lab.saved("qwen3"), tmp_path / "target", "hf")
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("extra", [127, 128])
def test_rows_are_padding_only_as_far_as_megatron_pads(tmp_path: Path, extra: int) -> None:
    """A vocabulary that one rank had is padded by at most 127 rows."""
    origin = save_tiny_model(tmp_path / "origin", vocab_size=101 + extra, **HEADS)
    convert(origin, tmp_path / "dist", "torch_dist")
    settings = json.loads((origin / "config.json").read_text())
    (origin / "config.json").write_text(json.dumps(settings | {"vocab_size": 101}))
    if extra == 127:
        done = convert(tmp_path / "dist", tmp_path / "back", "hf", base=str(origin))
        assert "127 rows after the vocabulary's 101 are padding" in done[0]
        return
    with pytest.raises(
        UserError,
        match=r"embedding.word_embeddings.weight is \(229, 64\), by the config \(101, 64\)",
    ):
        convert(tmp_path / "dist", tmp_path / "back", "hf", base=str(origin))
