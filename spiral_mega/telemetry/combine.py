"""Combine the metrics of several optimizer updates into those of one step."""

from __future__ import annotations

from collections.abc import Sequence

COUNTS = ("train/tokens", "optim/microbatches", "optim/skipped", "sampler/masked_tokens")


def combine_updates(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return one value for each metric: the sum of COUNTS, the largest of `*_max`, the mean of all
    others.

    All updates have the same metrics; without any update there are none.
    """
    combined = {}
    for name in updates[0] if updates else ():
        values = [update[name] for update in updates]
        if name.endswith("_max"):
            combined[name] = max(values)
        elif name in COUNTS:
            combined[name] = sum(values)
        else:
            combined[name] = sum(values) / len(values)
    return combined
