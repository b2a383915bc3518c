"""Each planted fault is found and reported with its remedy, and the command exits with status 1."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from spiral_mega.config import Config
from spiral_mega.doctor import diagnose, format_report, machine
from spiral_mega.doctor.finding import Finding
from tests.support.configs import make_config
from tests.support.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("healthy")
    save_tiny_model(folder / "model")
    (folder / "problems.jsonl").write_text(json.dumps({"problem": "w1 w2", "answer": "3"}) + "\n")
    return folder


@pytest.fixture
def place(healthy: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return shutil.copytree(healthy, tmp_path / "copy")


def config_of(folder: Path, **sections: dict[str, Any]) -> Config:
    data = {"data": {"train": [{"path": str(folder / "problems.jsonl")}]}}
    run = {"run": {"dir": str(folder / "run"), "steps": 1}}
    return make_config(folder / "model", **(run | data | sections))


def errors(findings: list[Finding]) -> dict[str, str]:
    return {finding.subject: finding.text for finding in findings if finding.level == "error"}


def test_a_healthy_run_has_nothing_to_fix(healthy: Path) -> None:
    findings = diagnose(config_of(healthy))
    assert errors(findings) == {}
    assert {"versions", "disk", "model", "tokenizer", "end tokens", "verifier"} <= {
        f.subject for f in findings
    }
    assert "nothing to fix" in format_report(findings)


def cut_weights(folder: Path) -> None:
    path = folder / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def another_shape(folder: Path) -> None:
    path = folder / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"intermediate_size": 128}))


def no_template(folder: Path) -> None:
    (folder / "model" / "chat_template.jinja").unlink()


def strange_end_token(folder: Path) -> None:
    path = folder / "model" / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": 5000}))


def large_tokenizer(folder: Path) -> None:
    path = folder / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 50}))


def broken_problems(folder: Path) -> None:
    (folder / "problems.jsonl").write_text('{"problem": "w1", "answer"')


def unreadable_truth(folder: Path) -> None:
    (folder / "problems.jsonl").write_text(
        json.dumps({"problem": "w1", "answer": "\\frac{1}{"}) + "\n"
    )


@pytest.mark.parametrize(
    "planted",
    [
        [
            (cut_weights, "model", "bytes where its header needs"),
            (no_template, "tokenizer", "has no chat template"),
            (broken_problems, "problems and verifier", "problems.jsonl"),
        ],
        [
            (another_shape, "model", "(64, 96), by its config.json (64, 128)"),
            (strange_end_token, "tokenizer", "names end tokens [5000]"),
            (unreadable_truth, "verifier", "not of a form that it reads"),
        ],
        [
            (large_tokenizer, "tokenizer", "has 101 tokens"),
            (large_tokenizer, "model", "by its config.json (50, 64)"),
        ],
    ],
)
def test_each_fault_is_found_under_its_own_subject(
    place: Path, planted: list[tuple[Any, str, str]]
) -> None:
    for fault, _, _ in planted:
        fault(place)
    found = errors(diagnose(config_of(place)))
    for _, subject, text in planted:
        assert text in found[subject]


def test_a_template_that_closes_turns_without_an_end_token_is_a_warning(place: Path) -> None:
    template = place / "model" / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|end|>", "<|user|>"))
    (warned,) = [
        f
        for f in diagnose(config_of(place))
        if f.level == "warning" and f.subject == "chat template"
    ]
    assert "eos_token_id" in warned.text


def test_a_verifier_that_fails_is_an_error(place: Path) -> None:
    source = {"path": str(place / "problems.jsonl"), "verifier": "tests.doctor.bad_verifier:score"}
    found = errors(diagnose(config_of(place, data={"train": [source]})))
    assert "ZeroDivisionError" in found["verifier"]


def test_a_model_that_only_the_hub_has_is_an_error_without_a_network(
    healthy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.constants, "HF_HUB_OFFLINE", True)
    found = errors(diagnose(config_of(healthy, model={"path": "nobody/nothing"})))
    assert "HF_HUB_OFFLINE" in found["hub cache"]


def test_small_shared_memory_and_missing_interfaces_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "MIN_SHARED_MEMORY", 2**60)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "nosuch0")
    found = errors(diagnose())
    assert "--shm-size" in found["shared memory"]
    assert "nosuch0" in found["network"]


def test_a_disk_too_small_for_the_checkpoints_is_an_error(
    healthy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(
        machine.shutil, "disk_usage", lambda path: usage._replace(free=machine.MIN_SHARED_MEMORY)
    )
    assert "disk" not in errors(diagnose(config_of(healthy)))
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: usage._replace(free=1_000_000))
    assert "checkpoint.keep_last" in errors(diagnose(config_of(healthy)))["disk"]


def test_an_installed_version_outside_the_requirements_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = machine.version
    monkeypatch.setattr(
        machine, "version", lambda name: "1.0" if name == "transformers" else real(name)
    )
    assert "transformers is 1.0" in errors(diagnose())["versions"]


def test_gpus_that_torch_cannot_use_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "0000:01:00.0").mkdir()
    monkeypatch.setattr(machine, "DEVICES", tmp_path)
    monkeypatch.setattr(machine.torch.cuda, "is_available", lambda: False)
    assert "1 are here" in errors(diagnose())["GPUs"]


def test_the_command_exits_with_1_when_something_is_to_fix_and_0_when_not(place: Path) -> None:
    config = place / "run.yaml"
    config.write_text(json.dumps(config_of(place).model_dump(mode="json")))
    command = [sys.executable, "-m", "spiral_mega", "doctor", str(config)]
    healthy = subprocess.run(command, capture_output=True, text=True)
    assert healthy.returncode == 0, healthy.stdout + healthy.stderr
    cut_weights(place)
    broken = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"NO_COLOR": "1"}
    )
    assert broken.returncode == 1
    assert "FAIL  model" in broken.stdout
