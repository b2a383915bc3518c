"""Turn the rewards of one problem into advantages. float64 throughout.

Symbols, as in the paper: N1 search traces, K sets, N2 aggregation traces for each set.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]


def set_scores(rewards: ArrayLike) -> FloatArray:
    """Return set scores [K] of aggregation rewards [K, N2]: f_l = (1/N2) sum_i r_li (paper, 3.2).

    Raises ValueError unless the rewards are finite and of a nonempty shape [K, N2].
    """
    scores: FloatArray = _finite(rewards, "rewards", ndim=2).mean(axis=1)
    return scores


def marginal_set_advantages(
    sets: Sequence[Sequence[int]], scores: ArrayLike, num_traces: int
) -> FloatArray:
    """Return the marginal set advantages [N1] of the search traces (eq. 8).

    A trace gets the mean of f_l - mean(f) over the sets l that contain it, and 0 if none does.
    `sets` holds K sets of distinct traces of 0..N1-1, `scores` is [K]. Raises ValueError for other
    shapes, for traces out of range or repeated in a set, and for scores that are not finite.
    """
    values = _finite(scores, "scores", ndim=1)
    member = _membership(sets, num_traces)
    if len(values) != len(member):
        raise ValueError(
            f"there are {len(member)} sets and {len(values)} scores: give one score for each set"
        )
    total = (values - values.mean()) @ member
    advantages: FloatArray = total / np.maximum(member.sum(axis=0), 1)
    return advantages


def aggregation_advantages(rewards: ArrayLike) -> FloatArray:
    """Return the advantages [K, N2] of the aggregation traces: r_li - f_l, within each set (eq. 9).

    Raises ValueError unless the rewards are finite and of a nonempty shape [K, N2].
    """
    values = _finite(rewards, "rewards", ndim=2)
    return values - set_scores(values)[:, None]


def spiral_advantages(
    sets: Sequence[Sequence[int]], aggregation_rewards: ArrayLike, num_traces: int
) -> tuple[FloatArray, FloatArray]:
    """Return the advantages of search traces [N1] (eq. 8) and of aggregation traces [K, N2] (eq. 9)."""
    search = marginal_set_advantages(sets, set_scores(aggregation_rewards), num_traces)
    return search, aggregation_advantages(aggregation_rewards)


def group_advantages(rewards: ArrayLike, normalize_std: bool = False) -> FloatArray:
    """Return the advantages [N] within one group, r_j - mean(r).

    With `normalize_std` they are divided by the group's population standard deviation. A group of
    equal rewards gets zeros. Raises ValueError unless the rewards are finite and not empty.
    """
    values = _finite(rewards, "rewards", ndim=1)
    # The mean of equal floats may be an ulp off, which a division by the deviation would amplify.
    if np.ptp(values) == 0:
        return np.zeros_like(values)
    centred = values - values.mean()
    if not normalize_std:
        return np.asarray(centred)
    # Scaled to the largest first, so that squares neither underflow nor overflow.
    centred /= np.abs(centred).max()
    normalized: FloatArray = centred / centred.std()
    return normalized


def leave_one_out_advantages(rewards: ArrayLike) -> FloatArray:
    """Return the leave-one-out advantages [N] within one group; 0 for N = 1.

    r_j - mean of the others' rewards = N / (N - 1) (r_j - mean(r)). Raises ValueError unless the
    rewards are finite and not empty.
    """
    centred = group_advantages(rewards)
    return centred * (len(centred) / max(len(centred) - 1, 1))


def _membership(sets: Sequence[Sequence[int]], num_traces: int) -> FloatArray:
    """Return [K, N1], 1 where the set contains the trace."""
    member = np.zeros((len(sets), num_traces))
    for row, chosen in zip(member, sets, strict=True):
        in_range = all(0 <= trace < num_traces for trace in chosen)
        if not chosen or len(set(chosen)) != len(chosen) or not in_range:
            raise ValueError(
                f"set {tuple(chosen)} must hold distinct traces of 0..{num_traces - 1}, at least one"
            )
        row[list(chosen)] = 1
    return member


def _finite(values: ArrayLike, name: str, ndim: int) -> FloatArray:
    try:
        array = np.asarray(values, dtype=np.float64)
    except ValueError as error:
        raise ValueError(f"{name} must be numbers in rows of equal length: {error}") from error
    if array.ndim != ndim or array.size == 0:
        raise ValueError(
            f"{name} has shape {array.shape}: it must have {ndim} dimension(s), none of them empty"
        )
    if not np.isfinite(array).all():
        position = np.argwhere(~np.isfinite(array))[0].tolist()
        bad = array[tuple(position)]
        raise ValueError(f"{name} holds {bad} at {position}: it must be finite")
    return array
