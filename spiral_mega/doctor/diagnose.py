"""Run all checks in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from spiral_mega.config import Config
from spiral_mega.doctor import machine, run_parts
from spiral_mega.doctor.finding import Finding, error
from spiral_mega.errors import UserError

Check = Callable[[], Iterable[Finding]]


def diagnose(config: Config | None = None) -> list[Finding]:
    """Check the machine and, with a `config`, everything that its run would use. Changes nothing."""
    findings: list[Finding] = []
    for subject, check in _checks(config):
        try:
            findings += check()
        except UserError as problem:
            findings.append(error(subject, str(problem)))
        except Exception as problem:  # every check must run, on any machine
            findings.append(
                error(subject, f"the check itself failed: {type(problem).__name__}: {problem}")
            )
    return findings


def _checks(config: Config | None) -> list[tuple[str, Check]]:
    checks: list[tuple[str, Check]] = [
        ("versions", partial(machine.versions, config)),
        ("GPUs", partial(machine.gpus, config)),
        ("network", machine.network),
        ("shared memory", machine.shared_memory),
        ("limits", machine.limits),
    ]
    if config is None:
        return [
            *checks,
            ("disk", partial(machine.disk, Path("."), needed_bytes=0)),
            ("hub cache", partial(machine.hub_cache, None)),
        ]
    return [
        *checks,
        ("disk", partial(run_parts.disk, config)),
        ("hub cache", partial(machine.hub_cache, config.model.path)),
        ("model", partial(run_parts.model_files, config)),
        ("tokenizer", partial(run_parts.tokenizer, config)),
        ("problems and verifier", partial(run_parts.problems_and_verifier, config)),
    ]
