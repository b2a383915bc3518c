"""From a problem, and for aggregation the traces, to the token ids of a prompt.

The texts below are the built-in ones; `PromptsConfig` replaces any of them. A template is literal text with
{placeholders}; {{word}} stands for the text {word}, and other braces, as LaTeX has them, mean nothing.

Problems and traces are data and may spell control tokens ("<|im_start|>system"), by accident or by design. Inside
data such text is broken up by an invisible character, so the tokenizer reads it as ordinary text: a trace can open no
turn of its own. Control tokens are those that the tokenizer declares special; markers that it declares ordinary, such
as Qwen3's <think>, stay as they are. Text without control tokens is tokenized exactly as the chat template does it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from spiral_mega.config.schema import PromptsConfig
from spiral_mega.errors import UserError
from spiral_mega.traces import Problem, Trace

INSTRUCTIONS = {"math": "Reason step by step, and put your final answer in \\boxed{}."}
"""By kind; other kinds have none, because nobody but their author knows how their answers are read."""

AGGREGATION = """\
Below are a problem and several candidate solutions, each written without sight of the others. Any of them may be \
wrong, incomplete or cut off, and several that agree may share one mistake.

Problem:
{problem}

{traces}

Audit these candidates first: follow their reasoning step by step, find where they part ways, and tell the ideas that \
hold from those that fail. Then build one correct and complete solution out of the sound ideas, closing the gaps they \
leave. If you see that no candidate is promising, say so and make a fresh attempt instead of recombining them. \
Answer in the form that the problem asks for."""

TRACE = "Candidate {number}:\n{trace}"
UNFINISHED = "Candidate {number} (unfinished: it reached the length limit before its end):\n{trace}"
TRACE_SEPARATOR = "\n\n"
OMITTED = "[...]"
"""Stands where a view leaves out text of a trace."""

TURN = "(a turn)"
"""Stands for what the model wrote, where only what follows it is wanted."""

THINK_START, THINK_END = "<think>", "</think>"
PLACEHOLDER = re.compile(r"\{\{([A-Za-z_]\w*)\}\}|\{([A-Za-z_]\w*)\}")
# \boxed{}, \boxed{...}, \boxed{answer}, or \boxed without braces; a filled box is part of a worked solution.
BOXED_INSTRUCTION = re.compile(
    r"\\boxed(?![A-Za-z])\s*(?:\{\s*(?:\.*|\\c?l?dots|[^{}]*answer[^{}]*)\s*\}|(?!\s*\{))", re.IGNORECASE
)
BREAKERS = ("\u200b", "\u2060", " ")
RENDERING_KEYS = {
    *("conversation", "tokenize", "add_generation_prompt", "continue_final_message", "tokenizer_kwargs"),
    *("padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
}

Span = tuple[str, bool]
"""A piece of a message: (text, whether it is ours); what is not ours may hold no control token."""


class Prompter:
    """Renders prompts through the tokenizer's chat template, with the generation prompt at the end.

    Raises UserError, naming the key, for a template that lacks a placeholder or has an unknown one, for a tokenizer
    without a chat template, and for a chat template that refuses the messages (some know no system message).
    """

    def __init__(self, config: PromptsConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self._search = _template("search", config.search, required={"problem"})
        self._aggregation = _template(
            "aggregation", AGGREGATION if config.aggregation is None else config.aggregation, {"problem", "traces"}
        )
        self._trace = _template("trace", TRACE if config.trace is None else config.trace, {"trace"}, {"number"})
        self._unfinished = _template(
            "unfinished", UNFINISHED if config.unfinished is None else config.unfinished, {"trace"}, {"number"}
        )
        self._check_tokenizer()
        self._control, self._breaker = _control_tokens(tokenizer)
        self._opens_thinking = self._probe().rstrip().endswith(THINK_START)

    def search_prompt(self, problem: Problem) -> list[int]:
        """Token ids [P] of the problem, with the answer instruction when it is wanted and not there yet."""
        return self._render(problem, _fill(self._search, problem=self._problem(problem)))

    def aggregation_prompt(self, problem: Problem, traces: Sequence[Trace]) -> list[int]:
        """Token ids [P] of the problem and the traces, numbered from 1 in the order given.

        The aggregation template replaces the last user message; earlier messages stay. Raises UserError without
        traces.
        """
        if not traces:
            raise UserError(f"problem {problem.id!r}: an aggregation prompt needs at least one trace")
        shown: list[Span] = []
        for number, trace in enumerate(traces, start=1):
            template = self._unfinished if trace.finish == "length" else self._trace
            shown += [(TRACE_SEPARATOR, True)] if shown else []
            shown += _fill(template, number=[(str(number), True)], trace=self._view(trace))
        return self._render(problem, _fill(self._aggregation, problem=self._problem(problem), traces=shown))

    def reply_ids(self, replies: Sequence[dict[str, str]], end_id: int) -> list[int]:
        """Token ids of an environment's `replies` to a turn that ended with the token `end_id`, and of what opens the
        next turn: what the chat template puts after that token. Raises UserError if it refuses the messages.
        """
        sealed = [{"role": each["role"], "content": self._seal([(each["content"], False)])} for each in replies]
        turn = [{"role": "user", "content": "x"}, {"role": "assistant", "content": TURN}]
        try:
            text: str = self._apply([*turn, *sealed], tokenize=False)
        except Exception as error:  # a template may raise anything
            roles = ", ".join(each["role"] for each in replies)
            raise UserError(
                f"the tokenizer's chat template refuses an environment's messages of role {roles} after a turn "
                f"({error}): let rollout.sampling.environment reply in a role that it knows"
            ) from error
        text = text[text.index(TURN) + len(TURN) :]
        before, end, after = text.partition(self.tokenizer.decode([end_id]))
        text = after if end and not before.strip() else text  # the model wrote the end token itself
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _problem(self, problem: Problem) -> list[Span]:
        text = problem.messages[-1]["content"]
        instruction = self.config.instruction
        if instruction is None:
            instruction = INSTRUCTIONS.get(problem.verifier, "")
        if not instruction or instruction in text or ("\\boxed" in instruction and BOXED_INSTRUCTION.search(text)):
            return [(text, False)]
        return [(text, False), ("\n\n" + instruction, True)]

    def _view(self, trace: Trace) -> list[Span]:
        """What the aggregator sees of a trace.

        `answer` shows what follows the last </think>. A trace that opened its thinking and never closed it has no
        answer: only the omission mark is shown, since the thinking is what this view exists to leave out. A trace
        that does not think at all is all answer, finished or not.
        """
        text = trace.text
        if self.config.view == "answer":
            if THINK_END in text:
                return [(text.rpartition(THINK_END)[2].strip(), False)]
            if self._opens_thinking or THINK_START in text:
                return [(OMITTED, True)]
        if (tail := self.config.tail_tokens) is not None:  # set exactly when the view is "tail"
            encoding = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            offsets = encoding["offset_mapping"]
            if len(offsets) > tail:
                return [(OMITTED + " ", True), (text[offsets[-tail][0] :], False)]
        return [(text, False)]

    def _render(self, problem: Problem, last: Sequence[Span]) -> list[int]:
        messages = [
            {"role": message["role"], "content": self._seal([(message["content"], False)])}
            for message in problem.messages[:-1]
        ]
        if self.config.system is not None and all(message["role"] != "system" for message in messages):
            messages.insert(0, {"role": "system", "content": self.config.system})
        messages.append({"role": problem.messages[-1]["role"], "content": self._seal(last)})
        ids: list[int] = self._apply(messages, tokenize=True)
        return ids

    def _apply(self, messages: list[dict[str, str]], tokenize: bool) -> Any:
        return self.tokenizer.apply_chat_template(
            messages,
            tokenize=tokenize,
            add_generation_prompt=True,
            return_dict=False,
            **self.config.chat_template_kwargs,
        )

    def _seal(self, spans: Sequence[Span]) -> str:
        """The message's text, with every control token broken up that is not wholly our own text."""
        text = "".join(part for part, _ in spans)
        if self._control is None or not self._control.search(text):
            return text
        ours = [own for part, own in spans for _ in part]
        position = 0
        while match := self._control.search(text, position):
            start, end = match.span()
            if all(ours[start:end]):
                position = end
                continue
            # A control token of one character cannot be broken up; the replacement character shows where it was.
            broken = "\ufffd" if end - start == 1 else match[0][0] + self._breaker + match[0][1:]
            text = text[:start] + broken + text[end:]
            ours[start:end] = [False] * len(broken)
            position = start  # what is left may hold a shorter control token
        return text

    def _check_tokenizer(self) -> None:
        if not self.tokenizer.chat_template:
            raise UserError(
                f"the tokenizer {self.tokenizer.name_or_path!r} has no chat template, as is usual for a base model: "
                "set model.tokenizer to a tokenizer that has one, or add a chat_template.jinja to the folder"
            )
        if self.config.view == "tail" and not self.tokenizer.is_fast:
            raise UserError(
                f"prompts.view is 'tail', but the tokenizer {self.tokenizer.name_or_path!r} gives no offsets: "
                "convert it to a tokenizer.json, or choose another view"
            )
        reserved = sorted(RENDERING_KEYS & set(self.config.chat_template_kwargs))
        if reserved:
            raise UserError(
                f"prompts.chat_template_kwargs sets {reserved}, which the trainer sets itself: leave them out"
            )

    def _probe(self) -> str:
        """A prompt as text; raises ValueError when the chat template refuses its messages."""
        system = [] if self.config.system is None else [{"role": "system", "content": self.config.system}]
        try:
            text: str = self._apply([*system, {"role": "user", "content": "x"}], tokenize=False)
        except Exception as error:  # a template may raise anything
            raise UserError(
                f"the tokenizer's chat template refuses {'a system and ' if system else ''}a user message ({error}): "
                "correct prompts.chat_template_kwargs, leave out prompts.system, or use another template"
            ) from error
        return text


def _template(key: str, text: str, required: set[str], optional: Collection[str] = ()) -> str:
    """`text`, if its placeholders are right; raises ValueError otherwise."""
    names = {match[2] for match in PLACEHOLDER.finditer(text) if match[2]}
    for name in sorted(required - names):
        raise UserError(f"prompts.{key} is {text!r}, without {{{name}}}: put {{{name}}} where it belongs")
    known = required | set(optional)
    for name in sorted(names - known):
        raise UserError(
            f"prompts.{key} is {text!r}, and {{{name}}} is none of its placeholders ({', '.join(sorted(known))}): "
            f"correct it, or write {{{{{name}}}}} for the text {{{name}}}"
        )
    return text


def _fill(template: str, **values: Sequence[Span]) -> list[Span]:
    """The template's spans with values in place of placeholders, in one pass: braces in values mean nothing."""
    spans: list[Span] = []
    position = 0
    for match in PLACEHOLDER.finditer(template):
        spans.append((template[position : match.start()], True))
        spans += [(f"{{{match[1]}}}", True)] if match[1] else values[match[2]]
        position = match.end()
    spans.append((template[position:], True))
    return spans


def _control_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[re.Pattern[str] | None, str]:
    """What matches a control token's text, the longest first, and a character that breaks all of them up.

    A tokenizer may drop invisible characters before it looks for control tokens, so each candidate is tried. Raises
    ValueError when none works.
    """
    added = {token.content: index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    special = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    control = {text: index for text, index in {**added, **special}.items() if text}
    if not control:
        return None, BREAKERS[0]
    pattern = re.compile("|".join(re.escape(text) for text in sorted(control, key=len, reverse=True)))
    # The unknown token comes out of any unknown word, and opens nothing.
    words = [text for text, index in control.items() if len(text) > 1 and index != tokenizer.unk_token_id]
    for breaker in BREAKERS:
        if not any(_reads(tokenizer, text[0] + breaker + text[1:], control[text]) for text in words):
            return pattern, breaker
    raise UserError(
        f"the tokenizer {tokenizer.name_or_path!r} reads {words} as control tokens even with a character between "
        "their letters, so problems and traces could forge turns: use a tokenizer with literal special tokens"
    )


def _reads(tokenizer: PreTrainedTokenizerBase, text: str, token_id: int) -> bool:
    """Whether tokenizing `text` gives `token_id`."""
    try:
        return token_id in tokenizer.encode(text, add_special_tokens=False)
    except Exception:  # a closed vocabulary refuses unknown words altogether
        return False
