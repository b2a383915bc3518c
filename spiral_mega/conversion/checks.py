"""Check that tensors and adapters match the config of the model that they are said to belong to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from spiral_mega.distributed.row_gather import TensorSpec
from spiral_mega.errors import UserError
from spiral_mega.models.peft_files import Adapter
from spiral_mega.models.safetensors_files import shorten

VOCABULARY = ("embed_tokens.weight", "lm_head.weight")  # weights with one row per token
MAX_PROBLEMS = 5  # that one error lists


def check_tensors(
    found: Mapping[str, TensorSpec],
    expected: Mapping[str, torch.Size],
    optional: set[str],
    origin: Path,
    model: Path,
) -> None:
    """Raise UserError, naming tensors, unless those `found` in `origin` have the `expected` names
    and shapes.

    `expected` is what config.json in `model` asks for; the `optional` ones may be missing (tied
    heads).
    """
    problems = []
    if missing := sorted(expected.keys() - found.keys() - optional):
        problems.append(f"it has no {shorten(missing)}")
    if unexpected := sorted(found.keys() - expected.keys()):
        problems.append(f"it has {shorten(unexpected)}, which the model does not know")
    for name in sorted(found.keys() & expected.keys()):
        if found[name].shape != expected[name]:
            problems.append(_shape_problem(name, found[name].shape, expected[name]))
    if problems:
        listed = "; ".join(problems[:MAX_PROBLEMS])
        rest = len(problems) - MAX_PROBLEMS
        more = f"; and {rest} more" if rest > 0 else ""
        raise UserError(f"{origin} is not the model of {model / 'config.json'}: {listed}{more}")


def _shape_problem(name: str, found: torch.Size, expected: torch.Size) -> str:
    if name.endswith(VOCABULARY) and found[1:] == expected[1:] and found[0] > expected[0]:
        extra = found[0] - expected[0]
        return (
            f"{name} has {found[0]} rows, the vocabulary {expected[0]}, so {extra} rows, padding "
            f"or not, would be cut: set vocab_size to {found[0]} in config.json to keep them"
        )
    return f"{name} is {tuple(found)}, by the config {tuple(expected)}"


def check_adapter(
    adapter: Adapter,
    expected: Mapping[str, torch.Size],
    origin: Path,
    base: Path,
) -> None:
    """Raise UserError unless every update has the shape of a weight of the base.

    `expected` are the base's shapes.
    """
    problems = []
    for name, update in adapter.updates.items():
        shape = torch.Size([len(update.b), update.a.shape[1]])
        if name not in expected:
            problems.append(f"{name} is not in the base")
        elif expected[name] != shape:
            problems.append(
                f"{name} is {tuple(expected[name])} in the base, the update {tuple(shape)}"
            )
    if problems:
        raise UserError(
            f"{origin} does not belong to {base}: {shorten(sorted(problems))}; give its own base by --base"
        )
