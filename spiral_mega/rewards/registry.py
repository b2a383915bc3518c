"""The built-in verifiers by name, and users' own by import path."""

from __future__ import annotations

from collections.abc import Callable

from spiral_mega.process.imports import load_function

RewardFunction = Callable[[str, tuple[str, ...]], float]

BUILT_IN = {
    "math": "spiral_mega.rewards.math_answer:score",
    "exact": "spiral_mega.rewards.text_answer:score",
    "arithmetic": "spiral_mega.rewards.number_path:score",
}


def check_verifier_name(name: str) -> None:
    """Raise ValueError unless `name` is a built-in verifier or the import path of a function that
    can serve as one.

    Imports a user's module, so that a mistake shows at start-up and not as a run of zero rewards.
    """
    if name not in BUILT_IN:
        load_verifier(name)


def load_verifier(name: str) -> RewardFunction:
    """Return the function (response, answers) -> reward that `name` denotes. Raises ValueError with name and reason."""
    path = BUILT_IN.get(name, name)
    known = f"known verifiers are {', '.join(BUILT_IN)}, or package.module:function"
    if ":" not in path:
        raise ValueError(f"there is no verifier {name!r}: {known}")
    if path.startswith("__main__:"):
        raise ValueError(
            f"the verifier {name!r} is in __main__, which verifier processes do not import: move "
            "it to a module"
        )
    try:
        return load_function(path, 2)
    except ValueError as error:
        wanted = "a function (response: str, answer: tuple[str, ...]) -> float"
        raise ValueError(f"the verifier {name!r} is not {wanted}: {error}; {known}") from error
