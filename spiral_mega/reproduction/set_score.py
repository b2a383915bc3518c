"""What SPIRAL's credit teaches the search, given how the aggregator succeeds on a set.

Let success[c] be the aggregator's success on sets of n traces of which c are right, and p the
probability that a single trace of a problem is right. A set's expected score is

    F(p) = sum over c of C(n, c) p^c (1-p)^(n-c) success[c].

SPIRAL's expected update of the search traces is M F'(p) grad p (proposition 3.1), GRPO's is (N - 1)
grad p. So F' states how much each problem counts. If F is linear in p, all problems count alike:
credit by sets then equals credit for single traces. An aggregator that finds any right member has
F' = n (1-p)^(n-1), as pass@n has, and gives problems that are seldom solved more weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise


def set_score(success: Sequence[float], p: float) -> float:
    """Compute F(p) for sets of len(success) - 1 traces."""
    size = len(success) - 1
    terms = (
        math.comb(size, c) * p**c * (1 - p) ** (size - c) * success[c] for c in range(size + 1)
    )
    return math.fsum(terms)


def set_score_slope(success: Sequence[float], p: float) -> float:
    """Compute F'(p) = n sum over c of C(n-1, c) p^c (1-p)^(n-1-c) (success[c+1] - success[c])."""
    gains = [after - before for before, after in pairwise(success)]
    return (len(success) - 1) * set_score(gains, p)


def hard_problem_weight(success: Sequence[float], hard: float = 0.1, easy: float = 0.5) -> float:
    """Compute F'(hard) / F'(easy), how much more a hard problem counts. GRPO has 1, pass@4 5.8."""
    return set_score_slope(success, hard) / set_score_slope(success, easy)
