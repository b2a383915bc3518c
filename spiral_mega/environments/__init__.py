"""Environments: what answers a trace's turns, such as tools and games.

An environment is a function (problem, messages) -> messages. It gets the problem's messages
followed by the trace's turns and its own replies so far, the last message being the turn that has
just ended. The model continues after what it returns; an empty list ends the trace. Replies are in
the context and not in the loss. The function must be quick, and depend on its arguments alone:
ranks that share an engine each call it themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from spiral_mega.config.schema import SamplingConfig
from spiral_mega.errors import UserError
from spiral_mega.process.imports import load_function
from spiral_mega.traces import Problem

Message = dict[str, str]

BUILT_IN = {"calculator": "spiral_mega.environments.calculator:reply"}


@dataclass(frozen=True, slots=True)
class Environment:
    """A `function`, its `name` in the configuration, and the most turns of the model in a trace."""

    name: str
    function: Callable[[Problem, list[Message]], list[Message]]
    max_turns: int

    def reply(self, problem: Problem, messages: list[Message]) -> list[Message]:
        """Return the function's messages.

        Raises UserError if it fails or returns anything but a list of messages.
        """
        try:
            replies = self.function(problem, [dict(message) for message in messages])
        except Exception as error:  # a user's function may fail in any way
            raise UserError(
                f"rollout.sampling.environment {self.name} failed on problem {problem.id} "
                f"({type(error).__name__}: {error})"
            ) from error
        if not isinstance(replies, list) or not all(map(_is_message, replies)):
            raise UserError(
                f"rollout.sampling.environment {self.name} replied {replies!r} on problem "
                f"{problem.id}: return a list of messages, each with a role and a content"
            )
        return replies


def make_environment(config: SamplingConfig) -> Environment | None:
    """Return the environment that `rollout.sampling.environment` names, or None if it is null.

    Raises ValueError if there is no such function.
    """
    if config.environment is None:
        return None
    try:
        function = load_function(BUILT_IN.get(config.environment, config.environment), 2)
    except ValueError as error:
        known = ", ".join(BUILT_IN)
        raise ValueError(
            f"rollout.sampling.environment is {config.environment!r}: {error}; use one of {known}, "
            "or a function (problem, messages) -> messages"
        ) from error
    return Environment(config.environment, function, config.max_turns)


def _is_message(value: object) -> bool:
    if not isinstance(value, dict) or value.keys() != {"role", "content"}:
        return False
    return all(isinstance(each, str) for each in value.values())
