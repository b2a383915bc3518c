"""The verifiers by name, and users' own by import path."""

from __future__ import annotations

from collections.abc import Callable

from spiral_mega.process.imports import load_function

RewardFunction = Callable[[str, tuple[str, ...]], float]

BUILT_IN = {
    "math": "spiral_mega.rewards.math_answer:score",
    "exact": "spiral_mega.rewards.text_answer:score",
    "arithmetic": "spiral_mega.rewards.number_path:score",
}


def check_verifier_name(kind: str) -> None:
    """Raise ValueError unless `kind` is a built-in kind or the import path of a function that can serve as one.

    Imports a user's module, so that a mistake shows at start-up and not as a run of zero rewards.
    """
    if kind not in BUILT_IN:
        load_verifier(kind)


def load_verifier(kind: str) -> RewardFunction:
    """The function (response, answers) -> reward that `kind` names. Raises ValueError, naming the kind and why."""
    path = BUILT_IN.get(kind, kind)
    known = f"known kinds are {', '.join(BUILT_IN)}, or package.module:function"
    if ":" not in path:
        raise ValueError(f"there is no verifier kind {kind!r}: {known}")
    if path.startswith("__main__:"):
        raise ValueError(f"the kind {kind!r} is in __main__, which worker processes do not load: move it to a module")
    try:
        return load_function(path, 2)
    except ValueError as error:
        wanted = "a function (response: str, answer: tuple[str, ...]) -> float"
        raise ValueError(f"the kind {kind!r} is no {wanted}: {error}; {known}") from error
