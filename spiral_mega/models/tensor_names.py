"""Name weights as Hugging Face checkpoints and vLLM do.

Only in mixtures of experts do transformers' own parameters differ. It fuses the experts of a layer,
files and engines name each one:

    transformers                                  checkpoint, vLLM
    ...experts.gate_up_proj [E, 2 I, H]   <->     ...experts.{e}.gate_proj.weight [I, H]
                                                  ...experts.{e}.up_proj.weight   [I, H]
    ...experts.down_proj    [E, H, I]     <->     ...experts.{e}.down_proj.weight [H, I]

Every other parameter has the same name in both.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
MOE_TYPES = (
    "qwen3_moe",
)  # model types whose checkpoints hold each expert's projections as separate tensors
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def to_checkpoint_names(
    model_type: str, parameters: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Rename the `parameters` of a transformers model of that type.

    Fused experts are split into views.
    """
    for name, tensor in parameters:
        owner, _, leaf = name.rpartition(".")
        if model_type not in MOE_TYPES or not owner.endswith(".experts"):
            yield name, tensor
        elif leaf == "gate_up_proj":
            for expert, gate_up in enumerate(tensor):
                gate, up = gate_up.chunk(2)
                yield f"{owner}.{expert}.gate_proj.weight", gate
                yield f"{owner}.{expert}.up_proj.weight", up
        else:
            for expert, down in enumerate(tensor):
                yield f"{owner}.{expert}.down_proj.weight", down


class ExpertSlice(NamedTuple):
    """Where an expert's projection is in transformers' fused parameter `name` of `shape`: `rows` of matrix `expert`."""

    name: str
    shape: torch.Size
    expert: int
    rows: range


def expert_slices(model_type: str, shapes: Mapping[str, torch.Size]) -> dict[str, ExpertSlice]:
    """Locate each expert's projection in transformers' fused parameters.

    `shapes` are those of a checkpoint's tensors, by name; the result covers the experts'
    projections among them.
    """
    if model_type not in MOE_TYPES:
        return {}
    matches = {name: match for name in shapes if (match := _EXPERT.fullmatch(name))}
    count = 1 + max((int(match[2]) for match in matches.values()), default=-1)
    slices = {}
    for name, match in matches.items():
        owner, expert, projection = match[1], int(match[2]), match[3]
        rows, columns = shapes[name]
        if projection == "down":
            shape = torch.Size((count, rows, columns))
            slices[name] = ExpertSlice(f"{owner}.down_proj", shape, expert, range(rows))
        else:
            shape = torch.Size((count, 2 * rows, columns))
            own_rows = range(rows, 2 * rows) if projection == "up" else range(rows)
            slices[name] = ExpertSlice(f"{owner}.gate_up_proj", shape, expert, own_rows)
    return slices
