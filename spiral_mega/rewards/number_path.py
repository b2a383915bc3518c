"""Kind `arithmetic`: a path of numbers from start to target by the allowed moves (the demo's game)."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")


def score(response: str, answer: tuple[str, ...]) -> float:
    """1.0 if `response` is a path that solves one of the games in `answer`, else 0.0.

    A game is JSON text {"start": s, "target": t, "moves": [[a, b], ...], "modulus": M, "max_hops":
    h}; max_hops may be missing. The response is integers separated by white space. The path begins
    at s, has one hop or more (at most h), ends at t, and every hop x -> y is y == (a * x + b) % M
    for some move. Raises ValueError or KeyError for an answer that is no game.
    """
    path = _path(response)
    return float(path is not None and any(_solves(path, json.loads(game)) for game in answer))


def answer_of(response: str) -> str | None:
    """The path in plain spelling; None if the response is not integers alone, or empty.

    Two paths that both solve a game are two answers.
    """
    path = _path(response)
    return " ".join(map(str, path)) if path else None


def _path(response: str) -> list[int] | None:
    tokens = response.split()
    return (
        [int(token) for token in tokens]
        if all(_INTEGER.fullmatch(token) for token in tokens)
        else None
    )


def _solves(path: list[int], game: dict[str, Any]) -> bool:
    start, target, modulus = game["start"], game["target"], game["modulus"]
    hops = len(path) - 1
    if hops < 1 or hops > game.get("max_hops", hops) or (path[0], path[-1]) != (start, target):
        return False
    return all(_is_move(x, y, game["moves"], modulus) for x, y in pairwise(path))


def _is_move(x: int, y: int, moves: list[tuple[int, int]], modulus: int) -> bool:
    return any(y == (a * x + b) % modulus for a, b in moves)
