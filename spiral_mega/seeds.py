"""Seeds that depend on what is sampled, never on who samples it or when."""

from __future__ import annotations

import hashlib

SEED_BITS = 62


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2**62) from the identity of what it is for, such as (run seed, step, problem
    id, "search").

    Requests for several samples use `seed + i` for sample i; hashing keeps the base seeds far
    apart.
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> (
        64 - SEED_BITS
    )
