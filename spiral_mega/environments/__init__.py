"""What a trace may talk to while it is written: tools, games, anything that answers a turn.

An environment is a function (problem, messages) -> messages. It is given the problem's messages and, after them, the
trace's turns and its own replies so far, the last a turn that has just ended; what it returns is shown to the model,
which then writes on. No messages end the trace. It has to be quick and to depend on nothing but its arguments: ranks
that share an engine each ask their own. Its replies are in the context and not in the loss.
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
    """`function`, known as `name` in the configuration; a trace has at most `max_turns` turns of the model."""

    name: str
    function: Callable[[Problem, list[Message]], list[Message]]
    max_turns: int

    def reply(self, problem: Problem, messages: list[Message]) -> list[Message]:
        """Its messages. Raises UserError when it fails, or returns what is no list of messages."""
        try:
            replies = self.function(problem, [dict(message) for message in messages])
        except Exception as error:  # a user's function may fail in any way
            raise UserError(
                f"rollout.sampling.environment {self.name} failed on problem {problem.id} ({type(error).__name__}: {error})"
            ) from error
        if not isinstance(replies, list) or not all(map(_is_message, replies)):
            raise UserError(
                f"rollout.sampling.environment {self.name} replied {replies!r} on problem {problem.id}: return a list of "
                "messages, each with a role and a content"
            )
        return replies


def make_environment(config: SamplingConfig) -> Environment | None:
    """What `rollout.sampling.environment` names, or None. Raises ValueError when there is no such function."""
    if config.environment is None:
        return None
    try:
        function = load_function(BUILT_IN.get(config.environment, config.environment), 2)
    except ValueError as error:
        known = ", ".join(BUILT_IN)
        raise ValueError(
            f"rollout.sampling.environment is {config.environment!r}: {error}; use one of {known}, or a function (problem, "
            "messages) -> messages"
        ) from error
    return Environment(config.environment, function, config.max_turns)


def _is_message(value: object) -> bool:
    form = isinstance(value, dict) and value.keys() == {"role", "content"}
    return form and all(isinstance(each, str) for each in value.values())  # type: ignore[attr-defined]
