"""The verifiers by name, and users' own by import path."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable

RewardFunction = Callable[[str, tuple[str, ...]], float]

BUILT_IN = {
    "math": "spiral_mega.rewards.math_answer:score",
    "exact": "spiral_mega.rewards.text_answer:score",
    "arithmetic": "spiral_mega.rewards.number_path:score",
}


def check_kind(kind: str) -> None:
    """Raise ValueError unless `kind` is a built-in kind or the import path of a function that can serve as one.

    Imports a user's module, so that a mistake shows at start-up and not as a run of zero rewards.
    """
    if kind not in BUILT_IN:
        load_kind(kind)


def load_kind(kind: str) -> RewardFunction:
    """The function (response, answers) -> reward that `kind` names. Raises ValueError, naming the kind and why."""
    path = BUILT_IN.get(kind, kind)
    module_name, colon, name = path.partition(":")
    known = f"known kinds are {', '.join(BUILT_IN)}, or package.module:function"
    if not (module_name and colon and name):
        raise ValueError(f"there is no verifier kind {kind!r}: {known}")
    if module_name == "__main__":
        raise ValueError(f"the kind {kind!r} is in __main__, which worker processes do not load: move it to a module")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (Exception, SystemExit) as error:  # a user's module may fail in any way
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"the kind {kind!r} cannot be imported ({reason}): {known}") from error
    try:
        inspect.signature(function).bind("response", ("answer",))
    except (TypeError, ValueError) as error:
        wanted = "it must be a function (response: str, answer: tuple[str, ...]) -> float"
        raise ValueError(f"the kind {kind!r} does not take a response and its answers ({error}): {wanted}") from error
    return function
