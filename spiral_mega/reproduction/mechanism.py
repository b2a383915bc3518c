"""What SPIRAL's credit asks of the search traces, given what the aggregator makes of a set. Pure functions.

With `success[c]` the aggregator's success on sets of n traces of which c are right, and p the chance that a single
trace of a problem is right, a set's expected score is F(p) = sum over c of C(n, c) p^c (1-p)^(n-c) success[c]. The
expected update of the search traces is M F'(p) grad p (proposition 3.1), that of GRPO (N - 1) grad p. So F' says which
problems count. Where F is linear in p, all alike: credit by sets is then credit for single traces. An aggregator that
finds any right member has F' = n (1-p)^(n-1), which is pass@n's, and favours the problems that are seldom solved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise


def set_score(success: Sequence[float], p: float) -> float:
    """F(p), for sets of len(success) - 1 traces."""
    size = len(success) - 1
    return math.fsum(math.comb(size, c) * p**c * (1 - p) ** (size - c) * success[c] for c in range(size + 1))


def slope(success: Sequence[float], p: float) -> float:
    """F'(p) = n sum over c of C(n-1, c) p^c (1-p)^(n-1-c) (success[c+1] - success[c])."""
    gains = [after - before for before, after in pairwise(success)]
    return (len(success) - 1) * set_score(gains, p)


def favour(success: Sequence[float], hard: float = 0.1, easy: float = 0.5) -> float:
    """F'(hard) / F'(easy): how much more a problem that is seldom solved counts. 1 for GRPO; 5.8 for pass@4."""
    return slope(success, hard) / slope(success, easy)
