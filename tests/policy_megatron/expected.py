"""The truth by the names of checkpoints: transformers keeps all experts of a layer in one tensor, its files do not."""

from tests.policy.reference import Tensors


def by_checkpoint_name(tensors: Tensors) -> Tensors:
    """`tensors` by parameter name, under the names of a checkpoint's files; a tied head under its own name as well."""
    named: Tensors = {}
    for name, tensor in tensors.items():
        owner, _, leaf = name.rpartition(".")
        if leaf == "gate_up_proj":
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2)
                named |= {
                    f"{owner}.{expert}.gate_proj.weight": gate,
                    f"{owner}.{expert}.up_proj.weight": up,
                }
        elif leaf == "down_proj":
            named |= {
                f"{owner}.{expert}.down_proj.weight": each for expert, each in enumerate(tensor)
            }
        else:
            named[name] = tensor
    return named | {
        "lm_head.weight": named.get("lm_head.weight", named["model.embed_tokens.weight"])
    }
