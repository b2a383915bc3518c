"""Derive seeds from what is sampled, independently of which rank samples it, and when."""

from __future__ import annotations

import hashlib

SEED_BITS = 62


def derive_seed(*parts: int | str) -> int:
    """Return a seed in [0, 2**62) for what `parts` identify.

    Such as (run seed, step, problem id, "search"). A request for several samples uses `seed + i` for
    sample i; hashing keeps the base seeds far apart.
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - SEED_BITS)
