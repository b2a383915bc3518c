"""Names of weights in Hugging Face checkpoints where transformers' own parameters are other tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch

EXPERTS_APART = ("qwen3_moe",)  # model types whose files hold every expert's gate, up and down projection on its own
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def checkpoint_tensors(
    model_type: str, parameters: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """`parameters` of a transformers model of that type as its checkpoint names them, as views of the same memory.

    transformers keeps the experts of a layer in two tensors, `gate_up_proj` [E, 2 I, H] and `down_proj` [E, H, I];
    files, engines and other trainers name each expert's.
    """
    for name, tensor in parameters:
        owner, _, leaf = name.rpartition(".")
        if model_type not in EXPERTS_APART or not owner.endswith(".experts"):
            yield name, tensor
        elif leaf == "gate_up_proj":
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2)
                yield f"{owner}.{expert}.gate_proj.weight", gate
                yield f"{owner}.{expert}.up_proj.weight", up
        else:
            for expert, down in enumerate(tensor):
                yield f"{owner}.{expert}.down_proj.weight", down


class Place(NamedTuple):
    """Where an expert's projection stands in transformers' own parameter `name` of `shape`: in these rows of the
    matrix of that `expert`."""

    name: str
    shape: torch.Size
    expert: int
    rows: range


def expert_places(model_type: str, shapes: Mapping[str, torch.Size]) -> dict[str, Place]:
    """Of the tensors that a checkpoint names, with their `shapes`, the place of each that is an expert's."""
    if model_type not in EXPERTS_APART:
        return {}
    found = {name: match for name in shapes if (match := EXPERT.fullmatch(name))}
    count = 1 + max((int(match[2]) for match in found.values()), default=-1)
    places = {}
    for name, match in found.items():
        owner, expert, leaf = match[1], int(match[2]), match[3]
        rows, columns = shapes[name]
        if leaf == "down":
            places[name] = Place(f"{owner}.down_proj", torch.Size((count, rows, columns)), expert, range(rows))
        else:
            mine = range(rows, 2 * rows) if leaf == "up" else range(rows)
            places[name] = Place(f"{owner}.gate_up_proj", torch.Size((count, 2 * rows, columns)), expert, mine)
    return places
