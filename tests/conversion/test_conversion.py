"""What is converted is loaded by the libraries that it is for, with the same bits; what does not fit is refused."""

import json
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from spiral_mega.conversion import convert, dcp, sources
from spiral_mega.distributed.row_gather import TensorSpec
from spiral_mega.errors import UserError
from spiral_mega.models.safetensors_files import ShardedWriter
from spiral_mega.models.tensor_names import ExpertSlice, expert_slices
from spiral_mega.models.weights import meta_model
from tests.support.ranks import run_ranks
from tests.support.tiny_models import END_ID, Family, save_tiny_model

TOKENS = list(range(10, 40))
LORA = {"rank": 4, "alpha": 6}
Tensors = dict[str, torch.Tensor]


@dataclass(eq=False)
class Trained:
    """Checkpoints that two ranks wrote, the weights that they stood for, and what FSDP2 made of a converted one."""

    folder: Path
    weights: dict[str, Tensors] = field(default_factory=dict, repr=False)

    def base(self, case: str) -> Path:
        return self.folder / f"{case} base"

    def checkpoint(self, case: str) -> Path:
        return self.folder / case / "step_000001"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    lab = Trained(tmp_path_factory.mktemp("trained"))
    large = {"num_attention_heads": 4, "num_key_value_heads": 2}  # what vLLM's kernels take
    save_tiny_model(lab.base("tied"), "qwen3", tied=True)
    save_tiny_model(lab.base("untied"), "llama", tied=False, dtype=torch.bfloat16)
    save_tiny_model(lab.base("lora tied"), "qwen3", tied=True, **large)
    save_tiny_model(lab.base("lora"), "llama", tied=False, dtype=torch.bfloat16)
    save_tiny_model(lab.base("experts"), "qwen3_moe", tied=False)
    cases = {
        case: (lab.base(case), LORA if "lora" in case else None, lab.folder / case)
        for case in ("tied", "untied", "lora tied", "lora", "experts")
    }
    converted = {}
    for case, like in (("start", "tied"), ("start with experts", "experts")):
        save_tiny_model(
            lab.base(case),
            "qwen3_moe" if like == "experts" else "qwen3",
            tied=like == "tied",
            seed=8,
        )
        convert(lab.base(case), lab.folder / f"{case} converted", "dcp", verify=True)
        converted[case] = lab.base(like), lab.folder / f"{case} converted"
    argument = cases, converted
    lab.weights = run_ranks(2, "tests.conversion.conversion_jobs:train_and_load", argument)[0]
    return lab


def streamed(model: torch.nn.Module) -> Tensors:
    return {
        name: parameter.detach()
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor([TOKENS])).logits[0]


def model_with(folder: Path, weights: Tensors) -> Any:
    """The model of the config in `folder` in float32, its head its own, with `weights`."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, tie_word_embeddings=False
    )
    model.load_state_dict(weights, strict=True)
    return model


def same_files(a: Path, b: Path, but: set[str] = frozenset({"SHA256SUMS"})) -> bool:
    names = [{file.name for file in folder.iterdir()} - but for folder in (a, b)]
    return names[0] == names[1] and all(
        (a / name).read_bytes() == (b / name).read_bytes() for name in names[0]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "tied"), [("qwen3", True), ("qwen3", False), ("qwen3_moe", True)]
)
def test_there_and_back_gives_the_same_tensors_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: Family, tied: bool, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(sources, "BLOCK_BYTES", 1000)  # several blocks a tensor
    origin = save_tiny_model(tmp_path / "origin", family, tied=tied, dtype=dtype)
    convert(origin, tmp_path / "dcp", "dcp")
    convert(tmp_path / "dcp", tmp_path / "back", "hf")
    before, after = (
        load_file(folder / "model.safetensors") for folder in (origin, tmp_path / "back")
    )
    assert before.keys() == after.keys()
    assert all(
        torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype
        for name in before
    )
    assert same_files(origin, tmp_path / "back", {"SHA256SUMS", "model.safetensors"})


def test_a_model_of_135m_parameters_comes_back_byte_for_byte(tmp_path: Path) -> None:
    shape = {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
    }
    config = LlamaConfig(vocab_size=49152, num_key_value_heads=3, tie_word_embeddings=True, **shape)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "origin")
    convert(tmp_path / "origin", tmp_path / "dcp", "dcp")
    convert(tmp_path / "dcp", tmp_path / "back", "hf")
    before, after = (
        load_file(tmp_path / name / "model.safetensors") for name in ("origin", "back")
    )
    assert sum(tensor.numel() for tensor in before.values()) == 134_515_008
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("case", ["start", "start with experts"])
def test_fsdp_loads_a_converted_checkpoint_on_two_ranks(trained: Trained, case: str) -> None:
    expected = load_file(trained.base(case) / "model.safetensors")
    loaded = trained.weights[case]
    assert loaded.keys() - expected.keys() == ({"lm_head.weight"} if case == "start" else set())
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_experts_that_two_ranks_saved_are_split_with_the_same_bits(
    trained: Trained, tmp_path: Path
) -> None:
    """Each rank held half of every layer's experts in two tensors."""
    convert(trained.checkpoint("experts"), tmp_path / "model", "hf", verify=True)
    found, expected = (
        load_file(tmp_path / "model" / "model.safetensors"),
        trained.weights["experts"],
    )
    assert found.keys() == expected.keys()
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in found
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    convert(trained.checkpoint("experts"), tmp_path / "whole", "dcp", verify=True)
    convert(tmp_path / "whole", tmp_path / "again", "hf")
    assert same_files(tmp_path / "model", tmp_path / "again")


@pytest.mark.parametrize("to", ["hf", "dcp", "dcp-megatron", "torch_dist"])
def test_what_a_rank_saved_of_a_layers_experts_is_read_once(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    reads = Counter[tuple[str, int]]()
    read = dcp.DcpReader.read

    def counted(self: dcp.DcpReader, name: str, offsets: Any, sizes: Any) -> torch.Tensor:
        reads[name, offsets[0]] += ".experts." in name
        return read(self, name, offsets, sizes)

    monkeypatch.setattr(dcp.DcpReader, "read", counted)
    convert(trained.checkpoint("experts"), tmp_path / "model", to)
    assert sorted(+reads) == [
        (f"policy.model.model.layers.{layer}.mlp.experts.{each}_proj", first)
        for layer in (0, 1) for each in ("down", "gate_up") for first in (0, 2)
    ]  # fmt: skip
    assert set((+reads).values()) == {1}


def test_verification_finds_gate_and_up_in_each_others_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def swapped(model_type: str, shapes: Any) -> dict[str, ExpertSlice]:
        places = expert_slices(model_type, shapes)
        other = {"gate_proj": "up_proj", "up_proj": "gate_proj", "down_proj": "down_proj"}
        leaves = {name: name.split(".")[-2] for name in places}
        return {name: places[name.replace(leaf, other[leaf])] for name, leaf in leaves.items()}

    monkeypatch.setattr(sys.modules[convert.__module__], "expert_slices", swapped)
    origin = save_tiny_model(tmp_path / "origin", "qwen3_moe")
    with pytest.raises(UserError, match="verif"):
        convert(origin, tmp_path / "target", "dcp", verify=True)


def test_experts_of_another_size_are_refused_by_name(trained: Trained, tmp_path: Path) -> None:
    for change, message in (({"num_experts": 3}, r"\(4, 96, 64\), by the config \(3, 96, 64\)"),
                         ({"moe_intermediate_size": 40}, r"\(4, 96, 64\), by the config \(4, 80, 64\)")):  # fmt: skip
        base = save_tiny_model(
            tmp_path / "other" / next(iter(change)), "qwen3_moe", tied=False, **change
        )
        with pytest.raises(UserError, match=f"experts.gate_up_proj in .* is {message}"):
            convert(trained.checkpoint("experts"), tmp_path / "model", "hf", base=str(base))
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("case", ["tied", "untied"])
def test_transformers_loads_a_trained_checkpoint_with_the_same_bits(
    trained: Trained, case: str, tmp_path: Path
) -> None:
    convert(trained.checkpoint(case), tmp_path / "model", "hf", verify=True)
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    found, expected = streamed(loaded), trained.weights[case]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert loaded.config.tie_word_embeddings == (case == "tied")
    assert loaded.generation_config.eos_token_id == [END_ID]


@pytest.mark.parametrize("case", ["lora tied", "lora"])
def test_peft_and_transformers_give_the_trained_adapters_logits(
    trained: Trained, case: str, tmp_path: Path
) -> None:
    expected = logits(model_with(trained.base(case), trained.weights[case]))
    plain = AutoModelForCausalLM.from_pretrained(trained.base(case), dtype=torch.float32)
    assert (logits(plain) - expected).abs().max() > 0.1  # there is something to convert
    convert(trained.checkpoint(case), tmp_path / "adapter", "peft", verify=True)
    torch.testing.assert_close(
        logits(PeftModel.from_pretrained(plain, tmp_path / "adapter")), expected, rtol=0, atol=1e-5
    )
    for name, origin in {
        "merged": trained.checkpoint(case),
        "merged too": tmp_path / "adapter",
    }.items():
        convert(origin, tmp_path / name, "hf", dtype=torch.float32, verify=True)
        merged, info = AutoModelForCausalLM.from_pretrained(
            tmp_path / name, output_loading_info=True
        )
        assert not info["missing_keys"]
        torch.testing.assert_close(logits(merged), expected, rtol=0, atol=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path / "adapter").chat_template


@pytest.mark.vllm
def test_vllm_gives_the_trained_log_probs_from_the_merged_model_and_from_the_adapter(
    trained: Trained, tmp_path: Path
) -> None:
    case = "lora tied"
    convert(trained.checkpoint(case), tmp_path / "merged", "hf")
    convert(trained.checkpoint(case), tmp_path / "adapter", "peft")
    argument = tmp_path / "merged", trained.base(case), tmp_path / "adapter", TOKENS
    (found,) = run_ranks(1, "tests.conversion.conversion_jobs:in_vllm", argument)
    reference = logits(model_with(trained.base(case), trained.weights[case])).log_softmax(-1)
    expected = reference[torch.arange(len(TOKENS) - 1), torch.tensor(TOKENS[1:])].tolist()
    assert found["merged"] == pytest.approx(expected, abs=1e-4)
    assert found["adapter"] == pytest.approx(expected, abs=1e-4)


def test_type_and_file_size_are_what_was_asked_for(tmp_path: Path) -> None:
    origin = save_tiny_model(tmp_path / "origin", "llama", tied=False)
    done = convert(
        origin, tmp_path / "half", "hf", dtype=torch.bfloat16, max_file_bytes=30_000, verify=True
    )
    assert "equal, bit for bit" in done[-1]
    files = sorted((tmp_path / "half").glob("*.safetensors"))
    assert len(files) > 3
    assert all(file.stat().st_size < 34_000 for file in files)
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
    expected = streamed(AutoModelForCausalLM.from_pretrained(origin))
    assert all(
        torch.equal(tensor, expected[name].bfloat16()) for name, tensor in streamed(loaded).items()
    )
    listed = subprocess.run(
        ["sha256sum", "--check", "SHA256SUMS"],
        cwd=tmp_path / "half",
        capture_output=True,
        text=True,
    )
    assert listed.returncode == 0
    assert len(listed.stdout.splitlines()) == len(list((tmp_path / "half").iterdir())) - 1


def edit(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


DOWN = "model.layers.1.mlp.down_proj.weight"
EMBEDDING = "model.embed_tokens.weight"
FAULTS = {
    "missing": (lambda t: t.pop(DOWN), f"it has no {DOWN}"),
    "unexpected": (
        lambda t: t.update({"model.layers.2.x": torch.ones(2)}),
        "model.layers.2.x, which the model does not",
    ),
    "another shape": (
        lambda t: t.update({DOWN: torch.ones(64, 95)}),
        f"{DOWN} is (64, 95), by the config (64, 96)",
    ),
    "padded vocabulary": (
        lambda t: t.update({EMBEDDING: torch.ones(128, 64)}),
        "27 rows, padding or not, would be cut",
    ),
}


@pytest.mark.parametrize("to", ["hf", "dcp"])
@pytest.mark.parametrize("fault", FAULTS)
def test_tensors_that_are_not_the_models_are_refused_by_name(
    tmp_path: Path, fault: str, to: str
) -> None:
    change, message = FAULTS[fault]
    origin = save_tiny_model(tmp_path / "origin")
    edit(origin, change)
    with pytest.raises(UserError, match=message.replace("(", r"\(").replace(")", r"\)")):
        convert(origin, tmp_path / "target", to)
    assert [path.name for path in tmp_path.iterdir()] == ["origin"]


def test_a_checkpoint_of_another_model_is_refused(trained: Trained, tmp_path: Path) -> None:
    other = save_tiny_model(tmp_path / "other", num_hidden_layers=3, intermediate_size=128)
    with pytest.raises(
        UserError,
        match=r"it has no model.layers.2.input_layernorm.weight.*by the config \(64, 128\)",
    ):
        convert(trained.checkpoint("tied"), tmp_path / "target", "hf", base=str(other))
    with pytest.raises(
        UserError, match=r"does not belong to .*down_proj.weight is \(64, 128\) in the base"
    ):
        convert(trained.checkpoint("lora tied"), tmp_path / "target", "hf", base=str(other))


def test_damaged_files_are_refused_and_leave_nothing(trained: Trained, tmp_path: Path) -> None:
    shutil.copytree(trained.checkpoint("tied"), tmp_path / "damaged")
    for file in (tmp_path / "damaged").glob("*.distcp"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 3])
    with pytest.raises(UserError, match=r"cannot be read .* the checkpoint is damaged"):
        convert(tmp_path / "damaged", tmp_path / "target", "hf")
    origin = save_tiny_model(tmp_path / "truncated")
    weights = origin / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(UserError, match="bytes where its header needs"):
        convert(origin, tmp_path / "target", "dcp")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged", "truncated"]


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
from spiral_mega.cli import app
app(["convert", *sys.argv[1:]])
"""


@pytest.mark.parametrize("to", ["hf", "dcp"])
def test_a_target_that_cannot_be_written_whole_is_reported_and_removed(
    tmp_path: Path, to: str
) -> None:
    origin = save_tiny_model(tmp_path / "origin")
    command = [sys.executable, "-c", LIMITED, str(origin), str(tmp_path / "target"), "--to", to]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 2, ended.stderr
    assert "cannot be written" in ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["origin"]


def test_formats_that_cannot_follow_and_targets_that_exist_are_refused(
    trained: Trained, tmp_path: Path
) -> None:
    for origin, target, to, message in (
        (trained.base("tied"), "x", "peft", "holds whole weights"),
        (trained.checkpoint("lora"), "x", "dcp", "is an adapter"),
        (tmp_path, "x", "hf", "neither a model"),
        (trained.base("tied"), "", "hf", "exists already"),
    ):
        with pytest.raises(UserError, match=message):
            convert(origin, tmp_path / target, to)


def test_the_tool_converts_from_a_checkout(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", "qwen3", tied=True)
    tool = Path(__file__).parents[2] / "tools" / "convert_checkpoint.py"
    command = [
        sys.executable,
        str(tool),
        str(tmp_path / "model"),
        str(tmp_path / "dcp"),
        "--to",
        "dcp",
    ]
    subprocess.run(command, check=True, cwd=tmp_path)
    convert(tmp_path / "dcp", tmp_path / "back", "hf")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_verification_notices_a_wrong_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = save_tiny_model(tmp_path / "origin")
    write = ShardedWriter.add_rows

    def wrong(self: ShardedWriter, name: str, start: int, rows: torch.Tensor) -> None:
        write(self, name, start, rows * 1.001 if name == DOWN else rows)

    monkeypatch.setattr(ShardedWriter, "add_rows", wrong)
    with pytest.raises(UserError, match="verification failed: logits differ"):
        convert(origin, tmp_path / "target", "hf", verify=True)


MEASURE = """
import resource, sys
from spiral_mega.cli import app
import spiral_mega.conversion.convert, spiral_mega.models.weights
from pathlib import Path
spiral_mega.models.weights.meta_model(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
app(["convert", *sys.argv[1:]], standalone_mode=False)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def test_memory_is_bounded_by_a_block_and_not_by_the_model(tmp_path: Path) -> None:
    """An 8B model's widths and vocabulary, with two of its layers: 3.3 GB of zeros in sparse files."""
    layer = {
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
    }
    config = LlamaConfig(
        vocab_size=151936, hidden_size=4096, num_hidden_layers=2, tie_word_embeddings=False, **layer
    )
    config.save_pretrained(tmp_path / "origin")
    specs = {
        n: TensorSpec(p.shape, torch.bfloat16)
        for n, p in meta_model(str(tmp_path / "origin")).named_parameters()
    }
    assert sum(spec.nbytes for spec in specs.values()) > 3e9
    ShardedWriter(tmp_path / "origin", specs, 10**9)  # makes the files, in which nothing is written
    for origin, target, to in (("origin", "dcp", "dcp"), ("dcp", "back", "hf")):
        command = [
            sys.executable,
            "-c",
            MEASURE,
            str(tmp_path / origin),
            str(tmp_path / target),
            "--to",
            to,
        ]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert float(printed.splitlines()[-1]) < 500  # MiB; the largest tensor has 1187
        shutil.rmtree(tmp_path / origin)
