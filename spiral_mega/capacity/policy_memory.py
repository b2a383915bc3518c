"""Memory that a policy takes on one rank, as the analytic models count it. Bytes throughout."""

from __future__ import annotations

from dataclasses import dataclass

FLOAT = 4
HEAD_STRIP = 128 * 2**20  # of logits' gradients; see kernels/gpu.py
RESPONSE_SHARE = 0.95  # of a micro-batch's tokens that are response tokens, and so reach the head


@dataclass(frozen=True, slots=True)
class PolicyMemory:
    """Bytes by purpose.

    - `resident`: held throughout the step.
    - `moments`: Adam's state, resident unless it is offloaded.
    - `update`: taken in addition by one micro-batch's forward and backward pass.
    - `step`: taken in addition by the optimizer step.
    """

    resident: dict[str, float]
    moments: dict[str, float]
    update: dict[str, float]
    step: dict[str, float]
