"""Mistakes in a configuration are reported before anything is loaded, with key, value and remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from spiral_mega.config import Config
from spiral_mega.errors import ConfigError
from spiral_mega.validation.load import dump_config, load_config
from spiral_mega.validation.models import check_models
from tests.support.configs import make_config
from tests.support.tiny_models import save_tiny_model

BASE = {
    "run": {"dir": "runs/x", "steps": 10},
    "model": {"path": "somewhere"},
    "data": {"train": [{"path": "train.jsonl"}], "max_prompt_tokens": 100},
    "rollout": {"sampling": {"max_response_tokens": 200, "max_context_tokens": 2000}},
}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.yaml"
    path.write_text(yaml.safe_dump(BASE))
    return path


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout.temprature=1", ["rollout.temprature", "did you mean 'sampling.temperature'"]),
        (
            "rollout.sampling.temprature=1",
            ["rollout.sampling.temprature", "did you mean 'temperature'"],
        ),
        ("nonsense.key=1", ["nonsense", "known keys"]),
        ("rollout.sampling.temperature=0", ["rollout.sampling.temperature", "greater than 0", "0"]),
        (
            "rollout.sampling.temperature=-1.5",
            ["rollout.sampling.temperature", "greater than 0", "-1.5"],
        ),
        ("rollout.sampling.temperature=nan", ["rollout.sampling.temperature", "nan"]),
        ("rollout.sampling.temperature=hot", ["rollout.sampling.temperature", "'hot'"]),
        ("run.steps=1.5", ["run.steps", "integer", "1.5"]),
        ("run.steps='10'", ["run.steps", "integer", "'10'"]),
        ("run.steps=0", ["run.steps", "greater than 0"]),
        ("algorithm.set_size=9", ["set_size", "9", "8"]),
        ("algorithm.num_sets=71", ["num_sets", "71", "70"]),
        ("algorithm.set_design=balanced algorithm.set_size=3", ["balanced", "3", "8"]),
        ("algorithm.set_design=balanced algorithm.num_sets=3", ["num_sets", "3", "partition"]),
        (
            "algorithm.set_design=ordered algorithm.set_order=random",
            ["algorithm.set_order", "ascending", "'ordered'"],
        ),
        ("algorithm.set_order=descending", ["algorithm.set_order", "descending", "'random'"]),
        ("algorithm.set_design=pretty", ["algorithm.set_design", "pretty", "'balanced'"]),
        ("algorithm.objective=spirl", ["algorithm.objective", "spirl", "grpo, ", "spiral"]),
        (
            "algorithm.target_length=201",
            ["algorithm.target_length", "201", "rollout.sampling.max_response_tokens", "200"],
        ),
        (
            "algorithm.options.normalize_std=true",
            ["algorithm.options.normalize_std", "known keys: none"],
        ),
        (
            "algorithm.objective=grpo algorithm.options.normalise_std=true",
            ["algorithm.options.normalise_std", "did you mean 'normalize_std'"],
        ),
        (
            "algorithm.objective=grpo algorithm.options.normalize_std=1",
            ["algorithm.options.normalize_std", "boolean"],
        ),
        (
            "algorithm.objective=custom",
            ["algorithm.options.score: missing", "algorithm.options.score=..."],
        ),
        (
            "algorithm.objective=custom algorithm.options.score=no.where:f",
            ["algorithm.options.score", "no.where:f"],
        ),
        (
            "algorithm.kl={coefficient: 0.1, estimator: k1}",
            ["algorithm.kl.estimator", "k1", "expected gradient is 0"],
        ),
        ("algorithm.kl={coefficient: 0.0}", ["algorithm.kl.coefficient", "greater than 0"]),
        ("algorithm.objective=rloo algorithm.search_traces=1", ["algorithm.search_traces", "rloo"]),
        ("algorithm.component_weights.search=1.0", ["component_weights", "aggregation"]),
        (
            "algorithm.component_weights=unbiased algorithm.aggregation_traces=1",
            ["unbiased", "aggregation"],
        ),
        ("algorithm.loss_reduction=mean", ["algorithm.loss_reduction", "mean"]),
        (
            "algorithm.loss=ppo_clip",
            ["algorithm.loss is 'ppo_clip'", "algorithm.loss.name=ppo_clip", "{name: ppo_clip}"],
        ),
        ("algorithm.loss.name=ppo", ["algorithm.loss.name is 'ppo'", "'ppo_clip', 'gspo'"]),
        (
            "algorithm.loss.clip_low=0.1",
            ["algorithm.loss.name: missing", "algorithm.loss.name=..."],
        ),
        ("algorithm.clip_low=0.1", ["algorithm.clip_low: unknown key", "'loss.clip_low'"]),
        (
            "algorithm.loss.name=cispo algorithm.loss.ratio_cap=2.0",
            ["algorithm.loss.ratio_cap: unknown key", "name, clip_low, clip_high"],
        ),
        (
            "algorithm.loss.name=gspo algorithm.loss.clip_high=-1.0",
            ["algorithm.loss.clip_high: ", "-1.0"],
        ),
        ("data.max_prompt_tokens=1900", ["data.max_prompt_tokens", "1900", "2000"]),
        (
            "rollout.sampling.max_context_tokens=1000",
            ["aggregation prompt", "algorithm.set_size", "1100", "1000"],
        ),
        (
            "rollout.sampling.max_response_tokens=2000",
            ["rollout.sampling.max_response_tokens", "2000"],
        ),
        ("policy.microbatch_tokens=1999", ["policy.microbatch_tokens", "1999", "2000"]),
        (
            "batch.problems=10 batch.minibatches=3",
            ["batch.problems", "10", "batch.minibatches", "3", "divisor"],
        ),
        ("prompts.view=tail", ["prompts.view", "prompts.tail_tokens"]),
        ("prompts.tail_tokens=5", ["prompts.view", "prompts.tail_tokens"]),
        ("optimizer.betas=[0.9]", ["optimizer.betas"]),
        ("optimizer.betas=[2,3]", ["optimizer.betas", "below 1"]),
        ("optimizer.lr=.inf", ["optimizer.lr", "finite"]),
        ("rollout.sampling.temperature=.inf", ["rollout.sampling.temperature", "finite"]),
        (
            "algorithm.component_weights={search: .nan, aggregation: 1.0}",
            ["component_weights", "finite"],
        ),
        ("run.seed=99999999999999999999999", ["run.seed"]),
        ("run=[1]", ["run"]),
        ("run.steps=", ["run.steps", "None"]),
        ("data.train.7.limit=5", ["data.train.7.limit"]),
        ("model.lora.rank=0", ["model.lora", "rank", "greater than 0"]),
        ("data.train=[]", ["data.train", "at least 1"]),
        (
            "rollout.sync.lora=adapter",
            ["rollout.sync.lora", "model.lora", "rollout.engine.name=vllm", "merge"],
        ),
        ("rollout.sync.lora=adapter rollout.engine.name=vllm", ["rollout.sync.lora", "model.lora"]),
        ("rollout.engine.sleep=true", ["rollout.engine.sleep", "transformers", "false"]),
        ("two_models.form=adapters", ["two_models.form", "adapters", "model.lora"]),
        ("two_models.form=both", ["two_models.form", "'adapters'", "'models'", "both"]),
        (
            "two_models.form=models two_models.frozen=phi",
            ["two_models.frozen", "phi", "'aggregation'"],
        ),
        (
            "two_models.form=adapters model.lora.rank=4 two_models.aggregation_model.path=b",
            ["two_models.aggregation_model", "adapters", "two_models.form=models"],
        ),
        (
            "two_models.form=models two_models.aggregation_model.path=b two_models.aggregation_model.tokenizer=c",
            ["two_models.aggregation_model.tokenizer", "'c'", "model.tokenizer"],
        ),
        (
            "two_models.form=models algorithm.objective=grpo",
            ["grpo", "no aggregation traces", "two_models.frozen=aggregation"],
        ),
        (
            "two_models.form=models two_models.frozen=search algorithm.objective=grpo",
            ["grpo", "no aggregation traces", "two_models.frozen is 'search'", "another objective"],
        ),
        (
            "two_models.form=models two_models.frozen=aggregation two_models.aggregation_optimizer.lr=0.1",
            ["two_models.aggregation_optimizer", "frozen"],
        ),
        (
            "two_models.form=models policy.backend=megatron",
            ["two_models", "'megatron'", "one model in a process", "fsdp"],
        ),
        (
            "two_models.form=models rollout.engine.name=vllm rollout.engine.sleep=true",
            ["rollout.engine.sleep", "two vLLM engines", "two_models.form=adapters"],
        ),
        (
            "rollout.record.read=a rollout.record.write=b",
            ["rollout.record.read", "rollout.record.write=null", "data.eval=[]"],
        ),
        ("batch.oversample=0.5", ["batch.oversample", "greater than or equal to 1"]),
        ("algorithm.max_sequence_ratio=1.0", ["max_sequence_ratio", "greater than 1"]),
        (
            "data.train=[{path: a.jsonl, verifier: maths}]",
            ["a.jsonl", "maths", "math, exact, arithmetic"],
        ),
        ("rollout.sampling.temperature", ["rollout.sampling.temperature", "key=value"]),
    ],
)
def test_a_wrong_value_is_refused_naming_key_value_and_remedy(
    base: Path, override: str, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(base, _split(override))
    text = str(error.value)
    assert all(word in text for word in words), text


def _split(overrides: str) -> list[str]:
    """Several overrides in one string; a space inside brackets does not separate."""
    return [overrides] if "{" in overrides else overrides.split(" ")


def test_all_contradictions_are_reported_at_once(base: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(
            base,
            [
                "batch.problems=10",
                "batch.minibatches=3",
                "algorithm.target_length=999",
                "run.stepz=1",
            ],
        )
    assert "run.stepz" in str(error.value)
    with pytest.raises(ConfigError) as error:
        load_config(
            base, ["batch.problems=10", "batch.minibatches=3", "algorithm.target_length=999"]
        )
    assert "batch.minibatches" in str(error.value)
    assert "algorithm.target_length" in str(error.value)


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump({**BASE, "run": {"dir": "runs/x"}}))
    with pytest.raises(ConfigError, match=r"run\.steps: missing"):
        load_config(path)


def test_later_files_and_overrides_win_over_included_ones(base: Path, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    other = {
        "rollout": {"sampling": {"temperature": 0.5}, "engine": {"max_num_seqs": 7}},
        "run": {"seed": 3},
    }
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(other))
    child = tmp_path / "sub" / "child.yaml"
    child.write_text(
        "include: [../base.yaml, ../other.yaml]\nrollout: {engine: {max_num_seqs: 9}}\n"
    )
    config = load_config(child, ["run.seed=4"])
    assert (
        config.rollout.sampling.temperature,
        config.rollout.engine.max_num_seqs,
        config.run.seed,
    ) == (0.5, 9, 4)
    assert config.rollout.sampling.max_context_tokens == 2000


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("include: missing.yaml", ["missing.yaml", "included by"]),
        ("include: 3", ["include", "3"]),
        ("include: child.yaml", ["includes itself"]),
        ("- a list", ["sections", "list"]),
        ("run: {dir: [", ["not valid YAML"]),
        ("", ["run: missing"]),
        ("5", ["child.yaml"]),
        ("include: base.yaml\nrun: [1]", ["does not fit the files that it includes"]),
        ("run: {steps: 1}\nrun: {steps: 2}", ["duplicate"]),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, base: Path, text: str, words: list[str]
) -> None:
    path = tmp_path / "child.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert "child.yaml" in str(error.value)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_an_element_of_a_list_can_be_overridden(base: Path) -> None:
    config = load_config(base, ["data.train.0.limit=5", "data.train[0].verifier=exact"])
    assert (config.data.train[0].limit, config.data.train[0].verifier) == (5, "exact")
    assert config.data.train[0].path == "train.jsonl"


def test_a_missing_or_binary_file_is_a_plain_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        load_config(tmp_path / "nowhere.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00run")
    with pytest.raises(ConfigError, match=r"binary\.yaml"):
        load_config(tmp_path / "binary.yaml")
    with pytest.raises(ConfigError, match=str(tmp_path)):
        load_config(tmp_path)


def test_what_is_printed_reads_back_to_the_same_configuration(base: Path, tmp_path: Path) -> None:
    overrides = [
        "optimizer.lr=2e-5",
        "optimizer.max_grad_norm=.inf",
        "model.lora.rank=8",
        "algorithm.component_weights={search: 2.0, aggregation: 0.5}",
        "prompts.search='{problem} \"quoted\" \\boxed{}'",
        "eval.every=3",
    ]
    config = load_config(base, overrides)
    (tmp_path / "printed.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "printed.yaml") == config
    assert config.optimizer.lr == 2e-5
    assert config.optimizer.max_grad_norm == float("inf")
    assert config.model.lora is not None
    assert config.model.lora.alpha == 32


def test_a_configuration_cannot_change_once_read(base: Path) -> None:
    config = load_config(base)
    with pytest.raises(ValueError, match="frozen"):
        config.run.steps = 5  # type: ignore[misc]


def test_the_defaults_are_those_of_the_paper() -> None:
    """Table 1 and appendix A of the paper; Tinker's Adam."""
    algorithm = Config.model_validate(BASE).algorithm
    shape = (
        algorithm.search_traces,
        algorithm.set_size,
        algorithm.num_sets,
        algorithm.aggregation_traces,
    )
    assert shape == (8, 4, 4, 4)
    assert (algorithm.objective, algorithm.set_design, algorithm.loss.name) == (
        "spiral",
        "uniform",
        "importance_sampling",
    )
    config = Config.model_validate({**BASE, "model": {"path": "x", "lora": {}}})
    assert config.model.lora is not None
    assert (config.model.lora.rank, config.model.lora.alpha) == (32, 32)
    assert (config.optimizer.lr, config.optimizer.betas, config.optimizer.eps) == (
        2e-5,
        (0.9, 0.95),
        1e-8,
    )
    assert (
        config.batch.problems,
        config.rollout.sampling.temperature,
        config.data.max_prompt_tokens,
    ) == (
        256,
        1.0,
        100,
    )


PARTS = Path("configs/models")  # what configurations include
WHOLE = sorted(path for path in Path("configs").rglob("*.yaml") if PARTS not in path.parents)


@pytest.mark.parametrize("path", WHOLE, ids=str)
def test_every_configuration_that_ships_is_valid(path: Path) -> None:
    assert load_config(path).run.steps > 0


def test_two_models_of_different_tokens_are_refused(tmp_path: Path) -> None:
    """The one reads what the other wrote."""
    theta, phi, other = (save_tiny_model(tmp_path / name) for name in ("theta", "phi", "other"))
    words = json.loads((other / "tokenizer.json").read_text())
    vocabulary = words["model"]["vocab"]
    vocabulary["w1"], vocabulary["w2"] = vocabulary["w2"], vocabulary["w1"]
    (other / "tokenizer.json").write_text(json.dumps(words))
    check_models(
        make_config(theta, two_models={"form": "models", "aggregation_model": {"path": str(phi)}})
    )
    with pytest.raises(
        ConfigError, match=r"two_models\.aggregation_model\.path .*other has other tokens"
    ):
        check_models(
            make_config(
                theta, two_models={"form": "models", "aggregation_model": {"path": str(other)}}
            )
        )
