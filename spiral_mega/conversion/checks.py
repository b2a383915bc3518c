"""Whether tensors are those that a model's config calls for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from spiral_mega.errors import UserError
from spiral_mega.models.safetensors_files import Form, shorten

VOCABULARY = ("embed_tokens.weight", "lm_head.weight")


def check_tensors(
    found: Mapping[str, Form], expected: Mapping[str, torch.Size], optional: set[str], origin: Path, model: Path
) -> None:
    """Raise UserError, naming tensors, unless `found` in `origin` has the names and shapes `expected` by the config in
    `model`. The `optional` ones may be missing (tied heads)."""
    problems = []
    if missing := sorted(expected.keys() - found.keys() - optional):
        problems.append(f"it has no {shorten(missing)}")
    if unexpected := sorted(found.keys() - expected.keys()):
        problems.append(f"it has {shorten(unexpected)}, which the model does not know")
    for name in sorted(found.keys() & expected.keys()):
        have, want = found[name].shape, expected[name]
        if have == want:
            continue
        padded = name.endswith(VOCABULARY) and have[1:] == want[1:] and have[0] > want[0]
        problems.append(
            f"{name} has {have[0]} rows, the vocabulary {want[0]}, so {have[0] - want[0]} rows, padding or not, "
            f"would be cut: set vocab_size to {have[0]} in config.json to keep them"
            if padded
            else f"{name} is {tuple(have)}, by the config {tuple(want)}"
        )
    if problems:
        rest = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise UserError(f"{origin} is not the model of {model / 'config.json'}: {'; '.join(problems[:5])}{rest}")
