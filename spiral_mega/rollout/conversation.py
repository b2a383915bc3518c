"""A trace under construction: turns of the model, and the environment's replies between them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from spiral_mega.environments import Message
from spiral_mega.rollout.engine import Sample
from spiral_mega.traces import Trace


@dataclass(slots=True)
class Conversation:
    """A trace and its chat.

    `messages` are the problem's, then turns and replies; `turns` counts the model's.
    """

    trace: Trace
    messages: list[Message]
    turns: int = 0

    def add_turn(self, sample: Sample, text: str) -> None:
        """Append a turn of the model. The trace finishes as its last turn did."""
        trace = self.trace
        if not self.turns:
            trace.cached_tokens = sample.cached_tokens
        trace.response_ids = [*trace.response_ids, *sample.token_ids]
        trace.logprobs = [*trace.logprobs, *sample.logprobs]
        trace.answer_start = len(trace.text)
        trace.text += text
        trace.finish = sample.finish
        self.messages.append({"role": "assistant", "content": text})
        self.turns += 1

    def add_replies(self, replies: list[Message], token_ids: list[int]) -> None:
        """Append replies as the tokens that the model sees; not sampled, they have no log-probs."""
        trace = self.trace
        start = len(trace.response_ids)
        trace.response_ids = [*trace.response_ids, *token_ids]
        trace.logprobs = [*trace.logprobs, *[math.nan] * len(token_ids)]
        trace.observation_spans = [*trace.observation_spans, (start, start + len(token_ids))]
        trace.text += "\n" + "".join(reply["content"] + "\n" for reply in replies)
        self.messages += replies
