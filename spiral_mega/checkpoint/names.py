"""Names of weights in Hugging Face checkpoints where transformers' own parameters are other tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

EXPERTS_APART = ("qwen3_moe",)  # model types whose files hold every expert's gate, up and down projection on its own


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
