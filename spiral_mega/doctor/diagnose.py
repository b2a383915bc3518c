"""All checks in order, and their report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from spiral_mega.config import Config
from spiral_mega.doctor import machine, run_parts
from spiral_mega.doctor.finding import Finding, error
from spiral_mega.errors import UserError

MARKS = {"ok": "  ok  ", "warning": " WARN ", "error": " FAIL "}


def diagnose(config: Config | None = None) -> list[Finding]:
    """Look at the machine, and with a `config` also at what its run would use. Nothing is changed or left behind."""

    def needed() -> int:
        return 0 if config is None else run_parts.room_needed(config)

    checks: list[tuple[str, Callable[[], Iterable[Finding]]]] = [
        ("versions", lambda: machine.versions(config)),
        ("GPUs", lambda: machine.gpus(config)),
        ("network", machine.network),
        ("shared memory", machine.shared_memory),
        ("limits", machine.limits),
        ("disk", lambda: machine.disk(Path("." if config is None else config.run.dir), needed())),
        ("hub cache", lambda: machine.hub_cache(None if config is None else config.model.path)),
        *([] if config is None else [(name, lambda check=check: check(config)) for name, check in run_parts.CHECKS]),
    ]
    findings: list[Finding] = []
    for subject, check in checks:
        try:
            findings += check()
        except UserError as problem:
            findings.append(error(subject, str(problem)))
        except Exception as problem:  # the doctor must get through all checks on any machine
            findings.append(error(subject, f"the check itself failed: {type(problem).__name__}: {problem}"))
    return findings


def show(findings: Sequence[Finding]) -> str:
    """The report: all that was looked at, then what is to be mended."""
    lines = [f"{MARKS[finding.level]} {finding.subject}: {finding.text}" for finding in findings]
    count = {level: sum(finding.level == level for finding in findings) for level in MARKS}
    if count["error"]:
        lines.append(f"\n{count['error']} to mend, {count['warning']} to look at")
    else:
        lines.append(f"\nnothing to mend, {count['warning']} to look at")
    return "\n".join(lines)
