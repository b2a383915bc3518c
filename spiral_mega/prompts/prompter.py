"""Renders prompts: from a problem, and for aggregation the traces of a set, to token ids.

    problem, traces --fill--> spans --ControlTokens.join--> message --chat template--> token ids

Text without control tokens is tokenized exactly as the chat template does it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from spiral_mega.config.schema import PromptsConfig
from spiral_mega.errors import UserError
from spiral_mega.prompts.control_tokens import ControlTokens
from spiral_mega.prompts.templates import (
    AGGREGATION,
    INSTRUCTIONS,
    OMITTED,
    TRACE,
    TRACE_SEPARATOR,
    UNFINISHED,
    Span,
    checked_template,
    fill,
)
from spiral_mega.traces import Problem, Trace

THINK_START, THINK_END = "<think>", "</think>"
TURN = "(a turn)"  # stands for what the model wrote, where only what follows it is wanted
# \boxed{}, \boxed{...}, \boxed{answer}, or \boxed without braces; a filled box is part of a worked
# solution.
BOXED_INSTRUCTION = re.compile(
    r"\\boxed(?![A-Za-z])\s*(?:\{\s*(?:\.*|\\c?l?dots|[^{}]*answer[^{}]*)\s*\}|(?!\s*\{))",
    re.IGNORECASE,
)
RENDERING_KEYS = {
    *(
        "conversation",
        "tokenize",
        "add_generation_prompt",
        "continue_final_message",
        "tokenizer_kwargs",
    ),
    *(
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
    ),
}


class Prompter:
    """Renders prompts through the tokenizer's chat template, with the generation prompt at the end.

    Raises UserError, naming the key, for a template that lacks a placeholder or has an unknown one,
    for a tokenizer without a chat template, and for a chat template that refuses the messages (some
    know no system message).
    """

    def __init__(self, config: PromptsConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self.config = config
        self.tokenizer = tokenizer
        aggregation = AGGREGATION if config.aggregation is None else config.aggregation
        trace = TRACE if config.trace is None else config.trace
        unfinished = UNFINISHED if config.unfinished is None else config.unfinished
        self._search = checked_template("search", config.search, {"problem"})
        self._aggregation = checked_template("aggregation", aggregation, {"problem", "traces"})
        self._trace = checked_template("trace", trace, {"trace"}, {"number"})
        self._unfinished = checked_template("unfinished", unfinished, {"trace"}, {"number"})
        self._check_tokenizer()
        self._control_tokens = ControlTokens(tokenizer)
        self._opens_thinking = self._sample_prompt().rstrip().endswith(THINK_START)

    def search_prompt(self, problem: Problem) -> list[int]:
        """Return token ids [P] of the problem, with the answer instruction if it lacks one."""
        return self._render(problem, fill(self._search, problem=self._problem(problem)))

    def aggregation_prompt(self, problem: Problem, traces: Sequence[Trace]) -> list[int]:
        """Return token ids [P] of the problem and the traces, numbered from 1 in the order given.

        The aggregation template replaces the last user message; earlier messages stay. Raises
        UserError without traces.
        """
        if not traces:
            raise UserError(
                f"problem {problem.id!r}: an aggregation prompt needs at least one trace"
            )
        shown: list[Span] = []
        for number, trace in enumerate(traces, start=1):
            if shown:
                shown.append(Span(TRACE_SEPARATOR, trusted=True))
            template = self._unfinished if trace.finish == "length" else self._trace
            shown_number = [Span(str(number), trusted=True)]
            shown += fill(template, number=shown_number, trace=self._view(trace))
        last = fill(self._aggregation, problem=self._problem(problem), traces=shown)
        return self._render(problem, last)

    def reply_ids(self, replies: Sequence[dict[str, str]], end_id: int) -> list[int]:
        """Return token ids of an environment's `replies`, up to where the next turn starts.

        These are what the chat template renders after the turn's last token, `end_id`. Raises
        UserError if the template refuses the messages.
        """
        turn = [{"role": "user", "content": "x"}, {"role": "assistant", "content": TURN}]
        safe_replies = [self._untrusted(reply) for reply in replies]
        try:
            text: str = self._apply_chat_template([*turn, *safe_replies], tokenize=False)
        except Exception as error:  # a template may raise anything
            roles = ", ".join(reply["role"] for reply in replies)
            raise UserError(
                f"the tokenizer's chat template refuses an environment's messages of role {roles} "
                f"after a turn ({error}): let rollout.sampling.environment reply in a role that it "
                "knows"
            ) from error
        after_turn = text[text.index(TURN) + len(TURN) :]
        before_end, end, after_end = after_turn.partition(self.tokenizer.decode([end_id]))
        if end and not before_end.strip():
            after_turn = after_end  # the model wrote the end token itself
        ids: list[int] = self.tokenizer.encode(after_turn, add_special_tokens=False)
        return ids

    def _problem(self, problem: Problem) -> list[Span]:
        """Return the problem's last message, with the answer instruction if it lacks one."""
        text = problem.messages[-1]["content"]
        instruction = self.config.instruction
        if instruction is None:
            instruction = INSTRUCTIONS.get(problem.verifier, "")
        asks_for_box = "\\boxed" in instruction and BOXED_INSTRUCTION.search(text)
        if not instruction or instruction in text or asks_for_box:
            return [Span(text, trusted=False)]
        return [Span(text, trusted=False), Span("\n\n" + instruction, trusted=True)]

    def _view(self, trace: Trace) -> list[Span]:
        """Return what an aggregation prompt shows of a trace, by `prompts.view`."""
        if self.config.view == "answer":
            return self._answer_view(trace.text)
        if self.config.view == "tail":
            assert self.config.tail_tokens is not None
            return self._tail_view(trace.text, self.config.tail_tokens)
        return [Span(trace.text, trusted=False)]

    def _answer_view(self, text: str) -> list[Span]:
        """Return what follows the last </think>.

        A trace that opened its thinking and never closed it has no answer: only the omission mark
        is shown, as this view exists to leave the thinking out. A trace without thinking is all
        answer, finished or not.
        """
        if THINK_END in text:
            return [Span(text.rpartition(THINK_END)[2].strip(), trusted=False)]
        if self._opens_thinking or THINK_START in text:
            return [Span(OMITTED, trusted=True)]
        return [Span(text, trusted=False)]

    def _tail_view(self, text: str, num_tokens: int) -> list[Span]:
        """Return the text of the last `num_tokens` tokens, after a mark if there are more."""
        encoding = self.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        offsets = encoding["offset_mapping"]
        if len(offsets) <= num_tokens:
            return [Span(text, trusted=False)]
        start = offsets[-num_tokens][0]
        return [Span(OMITTED + " ", trusted=True), Span(text[start:], trusted=False)]

    def _render(self, problem: Problem, last: Sequence[Span]) -> list[int]:
        """Return token ids of the problem's messages, of which the last one has the content `last`."""
        *earlier, final = problem.messages
        messages = [self._untrusted(message) for message in earlier]
        if self.config.system is not None and all(
            message["role"] != "system" for message in messages
        ):
            messages.insert(0, {"role": "system", "content": self.config.system})
        messages.append({"role": final["role"], "content": self._control_tokens.join(last)})
        ids: list[int] = self._apply_chat_template(messages, tokenize=True)
        return ids

    def _untrusted(self, message: dict[str, str]) -> dict[str, str]:
        """Return a message of data with its control tokens broken up."""
        content = self._control_tokens.join([Span(message["content"], trusted=False)])
        return {"role": message["role"], "content": content}

    def _apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool) -> Any:
        return self.tokenizer.apply_chat_template(
            messages,
            tokenize=tokenize,
            add_generation_prompt=True,
            return_dict=False,
            **self.config.chat_template_kwargs,
        )

    def _check_tokenizer(self) -> None:
        if not self.tokenizer.chat_template:
            raise UserError(
                f"the tokenizer {self.tokenizer.name_or_path!r} has no chat template, as is usual "
                "for a base model: set model.tokenizer to a tokenizer that has one, or add a "
                "chat_template.jinja to the folder"
            )
        if self.config.view == "tail" and not self.tokenizer.is_fast:
            raise UserError(
                f"prompts.view is 'tail', but the tokenizer {self.tokenizer.name_or_path!r} gives "
                "no offsets: convert it to a tokenizer.json, or choose another view"
            )
        reserved = sorted(RENDERING_KEYS & set(self.config.chat_template_kwargs))
        if reserved:
            raise UserError(
                f"prompts.chat_template_kwargs sets {reserved}, which the trainer sets itself: "
                "leave them out"
            )

    def _sample_prompt(self) -> str:
        """Return a prompt as text. Raises UserError if the chat template refuses it."""
        system = (
            []
            if self.config.system is None
            else [{"role": "system", "content": self.config.system}]
        )
        messages = [*system, {"role": "user", "content": "x"}]
        try:
            text: str = self._apply_chat_template(messages, tokenize=False)
        except Exception as error:  # a template may raise anything
            raise UserError(
                f"the tokenizer's chat template refuses {'a system and ' if system else ''}a user "
                f"message ({error}): correct prompts.chat_template_kwargs, leave out "
                "prompts.system, or use another template"
            ) from error
        return text
