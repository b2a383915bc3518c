"""Convert models between formats, a block of rows at a time: memory stays far below a model's size.

convert.py      the conversion: whole target or none
open_model.py   recognize and check the origin
sources.py      read tensors by blocks of rows; merge adapters
dcp.py          the trainer's checkpoints (torch.distributed.checkpoint), read and written
torch_dist.py   megatron-core's own checkpoints, read and written
checks.py       tensors and adapters against a model's config
verify.py       logits of both ends
"""

from spiral_mega.conversion.convert import DTYPES, FORMATS, convert

__all__ = ["DTYPES", "FORMATS", "convert"]
