"""Run the Triton kernels in Triton's interpreter and save their results. Needs TRITON_INTERPRET=1.

python -m tests.kernels.triton_interpreter_job results.pt
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from spiral_mega.kernels import gpu, linear_logprob
from spiral_mega.kernels.logits import Logits, Term
from tests.kernels.cases import EXTREME, HALF, RAGGED, Case, Tensors, arguments, computed

STRIPS = {
    "several strips": Case(40, 24, 2500),
    "bfloat16 strips": Case(70, 72, 2300, dtype=torch.bfloat16, rank=3),
}
CASES = RAGGED | EXTREME | HALF | STRIPS


def impossible_rows() -> Tensors:
    """Compute rows whose logits are all -inf, and one target outside the vocabulary."""
    tensors = RAGGED["temperature"].tensors()
    tensors["targets"][3] = 300
    given = arguments(tensors)
    lost = linear_logprob(**given | {"bias": torch.full((300,), -torch.inf)}, backend="triton")
    return {
        "lost": lost.logprob,
        "lost logsumexp": lost.logsumexp,
        "outside": linear_logprob(**given, backend="triton")[0],
    }


def empty_shard() -> Tensors:
    logits = Logits((Term(torch.randn(70, 16), torch.randn(0, 16)),), None, 1.0, None)
    return gpu.statistics(logits, torch.zeros(70, dtype=torch.long), with_dot=True)._asdict()


def main() -> None:
    gpu.STRIP_ELEMENTS = 1  # the narrowest strips, of 1,024 entries
    results = {
        name: computed(case.tensors(), case, backend="triton") for name, case in CASES.items()
    }
    again = replace(RAGGED["ragged"], dtype=torch.bfloat16)
    results |= {f"again {i}": computed(again.tensors(), again, backend="triton") for i in range(2)}
    torch.save(
        results | {"impossible rows": impossible_rows(), "empty shard": empty_shard()}, sys.argv[1]
    )


if __name__ == "__main__":
    main()
