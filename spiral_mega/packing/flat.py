"""Sequences side by side in one row, each seeing only itself; and where its losses are read."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch

from spiral_mega.packing.sequences import Sequence


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One micro-batch of S sequences and T tokens, of which R response tokens are learnt from.

    `input_ids`, `position_ids` [1, T]; `cu_seqlens` [S + 1] int32; `rows` [R]: where each response token is predicted
    (the token before it); `targets`, `sampler_logprobs`, `advantages`, `weights`, `sequence_ids` [R].
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    max_length: int
    rows: torch.Tensor
    targets: torch.Tensor
    sampler_logprobs: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    sequence_ids: torch.Tensor

    def to(self, device: torch.device) -> PackedBatch:
        tensors = {f.name: getattr(self, f.name).to(device) for f in fields(self) if f.name != "max_length"}
        return replace(self, **tensors)

    def attention_kwargs(self) -> dict[str, torch.Tensor | int]:
        """What variable-length attention needs, under the names that transformers passes to its attention."""
        return {
            "cu_seq_lens_q": self.cu_seqlens,
            "cu_seq_lens_k": self.cu_seqlens,
            "max_length_q": self.max_length,
            "max_length_k": self.max_length,
        }


def pack(sequences: list[Sequence]) -> PackedBatch:
    """Lay out sequences in order. Without any, a single token with no loss, so that a rank can keep step.

    Raises ValueError for a sequence whose first response token has nothing to be predicted from, or whose tokens and
    log-probs do not match.
    """
    for s in sequences:
        if not s.prompt_ids:
            raise ValueError(f"sequence {s.key} has an empty prompt")
        if len(s.response_ids) != len(s.sampler_logprobs):
            raise ValueError(
                f"sequence {s.key} has {len(s.response_ids)} response tokens and {len(s.sampler_logprobs)} "
                "sampler log-probs"
            )
    token_lists = [[*s.prompt_ids, *s.response_ids] for s in sequences] or [[0]]
    lengths = torch.tensor([len(tokens) for tokens in token_lists])
    starts = lengths.cumsum(0) - lengths
    responses = torch.tensor([len(s.response_ids) for s in sequences], dtype=torch.long)
    rows = [
        torch.arange(start + len(s.prompt_ids) - 1, start + s.num_tokens - 1)
        for start, s in zip(starts.tolist(), sequences, strict=False)
    ]
    return PackedBatch(
        input_ids=torch.tensor([token for tokens in token_lists for token in tokens])[None],
        position_ids=torch.cat([torch.arange(n) for n in lengths.tolist()])[None],
        cu_seqlens=torch.cat([starts, lengths.sum()[None]]).to(torch.int32),
        max_length=int(lengths.max()),
        rows=torch.cat(rows) if rows else torch.zeros(0, dtype=torch.long),
        targets=torch.tensor([t for s in sequences for t in s.response_ids], dtype=torch.long),
        sampler_logprobs=torch.tensor([p for s in sequences for p in s.sampler_logprobs], dtype=torch.float32),
        advantages=torch.tensor([s.advantage for s in sequences], dtype=torch.float32).repeat_interleave(responses),
        weights=torch.tensor([s.weight for s in sequences], dtype=torch.float32).repeat_interleave(responses),
        sequence_ids=torch.arange(len(sequences)).repeat_interleave(responses),
    )
