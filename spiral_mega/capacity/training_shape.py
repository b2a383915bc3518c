"""What a policy takes of a rank's memory, as the analytic model counts it."""

from __future__ import annotations

from dataclasses import dataclass

FLOAT = 4
HEAD_STRIP = 128 * 2**20  # of logits' gradients; kernels/gpu.py
SHARE_LEARNT = 0.95  # of a micro-batch's tokens that are response tokens, and so reach the head


@dataclass(frozen=True, slots=True)
class Training:
    """Bytes by what they are for: held all the time; moments, held unless they are offloaded; and what a micro-batch's
    update, and the optimizer's step, take beside."""

    held: dict[str, float]
    moments: dict[str, float]
    update: dict[str, float]
    step: dict[str, float]
