"""The harnesses by kind, and reading them from the configuration's `eval.harnesses`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spiral_mega.config.section import read_section
from spiral_mega.errors import ConfigError
from spiral_mega.evaluation.harnesses.best_of_n import BestOfN
from spiral_mega.evaluation.harnesses.harness import Harness
from spiral_mega.evaluation.harnesses.majority import Majority
from spiral_mega.evaluation.harnesses.pass_at_k import PassAtK
from spiral_mega.evaluation.harnesses.pipeline import StagedPipeline
from spiral_mega.evaluation.harnesses.rsa import Rsa
from spiral_mega.evaluation.harnesses.sequential import Sequential

HARNESSES: dict[str, type[Harness]] = {
    "pass_at_k": PassAtK,
    "majority": Majority,
    "best_of_n": BestOfN,
    "sequential": Sequential,
    "rsa": Rsa,
    "pipeline": StagedPipeline,
}


def read_harnesses(entries: Sequence[Mapping[str, Any]]) -> list[Harness]:
    """Read the entries of `eval.harnesses` by their `kind`. Raises ConfigError that names every fault."""
    harnesses: list[Harness] = []
    faults: list[str] = []
    for index, entry in enumerate(entries):
        try:
            harnesses.append(_read_harness(entry, f"eval.harnesses.{index}"))
        except ConfigError as error:
            faults.append(str(error))
    if faults:
        raise ConfigError("; ".join(faults))
    return harnesses


def _read_harness(entry: Mapping[str, Any], key: str) -> Harness:
    kinds = ", ".join(HARNESSES)
    if "kind" not in entry:
        raise ConfigError(f"{key}.kind: missing; set it to one of {kinds}")
    kind = entry["kind"]
    if not isinstance(kind, str) or kind not in HARNESSES:
        raise ConfigError(
            f"{key}.kind is {kind!r}, which is not a harness: set it to one of {kinds}"
        )
    return read_section(HARNESSES[kind], dict(entry), key)
