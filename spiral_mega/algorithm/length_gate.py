"""Length gate: no positive advantage for a response longer than the target."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from spiral_mega.algorithm.advantages import FloatArray
from spiral_mega.traces import Trace


def gate_advantages(
    advantages: ArrayLike, lengths: ArrayLike, target_length: int | None
) -> FloatArray:
    """Return 0 where A > 0 and L > target_length, and A elsewhere (eq. 10); elementwise.

    `lengths` count response tokens, the end token included. A `target_length` of None is no gate.
    Raises ValueError if the shapes differ.
    """
    values = np.asarray(advantages, dtype=np.float64)
    tokens = np.asarray(lengths)
    if values.shape != tokens.shape:
        raise ValueError(
            f"advantages have shape {values.shape} and lengths {tokens.shape}: give one length for each"
        )
    if target_length is None:
        return values.copy()
    return np.where((values > 0) & (tokens > target_length), 0.0, values)


def assign_gated(traces: Sequence[Trace], advantages: ArrayLike, target_length: int | None) -> None:
    """Write gated advantages [N] to N traces, and to each whether the gate changed its own."""
    raw = np.asarray(advantages, dtype=np.float64)
    gated = gate_advantages(raw, [trace.length for trace in traces], target_length)
    for trace, before, after in zip(traces, raw.tolist(), gated.tolist(), strict=True):
        trace.advantage, trace.gated = after, after != before


def assign_gated_groups(
    groups: Sequence[Sequence[Trace]], advantages: ArrayLike, target_length: int | None
) -> None:
    """Write gated advantages [K, N2] to K groups of N2 traces, as `assign_gated` does."""
    for traces, group_advantages in zip(groups, np.asarray(advantages), strict=True):
        assign_gated(traces, group_advantages, target_length)
