"""Convert raw rows to problems: one adapter for each schema in common use.

| schema | columns                                            | answer                          |
|--------|----------------------------------------------------|---------------------------------|
| own    | id, messages, answer, verifier, source (extra)     | list of texts (`problem_row`)   |
| verl   | prompt, reward_model (data_source and others)      | reward_model.ground_truth       |
| gsm8k  | question, answer                                   | what follows the last ####      |
| plain  | one of problem, question, prompt, messages; answer | the value itself                |

Columns that an adapter does not use are kept in `Problem.extra`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any

from spiral_mega.data.readers import Row
from spiral_mega.errors import DataError
from spiral_mega.rewards.answers import normalize_answer
from spiral_mega.traces import Problem

ROLES = ("system", "user", "assistant")
QUESTION_COLUMNS = ("problem", "question", "prompt", "messages")
ANSWER_MARK = "####"
THOUSANDS = re.compile(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?")

Adapter = Callable[[Row, str, str, str], Problem]
"""(row, name of the source, default id, default verifier) -> Problem."""


def choose_adapter(rows: Collection[tuple[str, Row]]) -> Adapter:
    """Return the adapter for a source's rows, chosen by the columns of the first; `rows` are
    (location, row).

    GSM8K alone is recognized by values: any answer with a #### makes the whole source GSM8K, so
    that a row without it is an error and not another form of answer. Raises DataError when the
    columns fit no schema.
    """
    location, first = next(iter(rows))
    columns = set(first)
    if {"id", "messages", "answer", "verifier", "source"} <= columns:
        return own
    if {"prompt", "reward_model"} <= columns:
        return verl
    questions = [column for column in QUESTION_COLUMNS if column in columns]
    if not questions or "answer" not in columns:
        raise DataError(
            f"{location}: columns {sorted(columns)} fit no known schema: rename them to 'problem' "
            "and 'answer', or to 'prompt' and 'reward_model' with a 'ground_truth'"
        )
    if any(ANSWER_MARK in str(row.get("answer")) for _, row in rows):
        return gsm8k
    return plain


def own(row: Row, name: str, default_id: str, default_verifier: str) -> Problem:
    """A row that `problem_row` wrote: its own verifier and source override those of the configuration."""
    answer = _need(row, "answer")
    if (
        not isinstance(answer, list)
        or not answer
        or not all(isinstance(text, str) for text in answer)
    ):
        raise DataError(f"answer is {answer!r}, not a list of texts: write the file again")
    return Problem(
        id=_own_id(row, default_id),
        messages=_messages("messages", _need(row, "messages")),
        answer=tuple(_text("answer", text) for text in answer),
        verifier=_text("verifier", _need(row, "verifier")),
        source=str(_need(row, "source")),
        extra=row.get("extra") or {},
    )


def verl(row: Row, name: str, default_id: str, default_verifier: str) -> Problem:
    """The schema of verl and POLARIS: chat messages, and the ground truth inside reward_model."""
    reward_model = _need(row, "reward_model")
    if not isinstance(reward_model, dict) or "ground_truth" not in reward_model:
        raise DataError(
            f"reward_model is {reward_model!r}, without a ground_truth: add it, or remove the row"
        )
    return Problem(
        id=_own_id(row, default_id),
        messages=_messages("prompt", _need(row, "prompt")),
        answer=_answer("reward_model.ground_truth", reward_model["ground_truth"]),
        verifier=default_verifier,
        source=str(row.get("data_source") or name),
        extra=_extra(row, used=("id", "prompt", "data_source")),
    )


def gsm8k(row: Row, name: str, default_id: str, default_verifier: str) -> Problem:
    """The schema of GSM8K: the answer is a worked solution that ends with "#### 1,234"."""
    column = _question_column(row)
    worked = _text("answer", _need(row, "answer"))
    _, mark, final = worked.rpartition(ANSWER_MARK)
    if not mark:
        raise DataError(
            f"answer has no {ANSWER_MARK} before a final answer, as other rows do: "
            f"{worked[-80:]!r}: add it, or remove the row"
        )
    final = final.strip()
    if THOUSANDS.fullmatch(final):
        final = final.replace(",", "")
    return Problem(
        id=_own_id(row, default_id),
        messages=_messages(column, _need(row, column)),
        answer=_answer("answer", final),
        verifier=default_verifier,
        source=name,
        extra=_extra(row, used=("id", column)),
    )


def plain(row: Row, name: str, default_id: str, default_verifier: str) -> Problem:
    """A problem (text or messages) and its answer (text, number, or a list of accepted answers)."""
    column = _question_column(row)
    return Problem(
        id=_own_id(row, default_id),
        messages=_messages(column, _need(row, column)),
        answer=_answer("answer", _need(row, "answer")),
        verifier=default_verifier,
        source=name,
        extra=_extra(row, used=("id", "answer", column)),
    )


def problem_row(problem: Problem) -> Row:
    """Return the problem as a JSON object that `own` reads back to an equal Problem."""
    return {
        "id": problem.id,
        "messages": [dict(message) for message in problem.messages],
        "answer": list(problem.answer),
        "verifier": problem.verifier,
        "source": problem.source,
        "extra": problem.extra,
    }


def _question_column(row: Row) -> str:
    columns = [column for column in QUESTION_COLUMNS if column in row]
    if len(columns) != 1:
        raise DataError(
            f"columns {sorted(row)} hold {len(columns)} of {QUESTION_COLUMNS}: each row needs exactly one"
        )
    return columns[0]


def _need(row: Row, column: str) -> Any:
    if column not in row:
        raise DataError(
            f"column {column!r} is missing, which other rows have: add it, or remove the row"
        )
    if row[column] is None:
        raise DataError(f"{column} is null: fill it in, or remove the row")
    return row[column]


def _text(column: str, value: Any) -> str:
    if not isinstance(value, str):
        raise DataError(
            f"{column} is {value!r} ({type(value).__name__}), not text: correct it, or remove the row"
        )
    if not value.strip():
        raise DataError(f"{column} is empty ({value!r}): fill it in, or remove the row")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON escapes can spell half of a surrogate pair
        raise DataError(
            f"{column} is not UTF-8 text ({error}): correct it, or remove the row"
        ) from None
    return value


def _own_id(row: Row, default: str) -> str:
    identity = row.get("id")
    return default if identity is None else _text("id", str(identity))


def _messages(column: str, value: Any) -> tuple[dict[str, str], ...]:
    if isinstance(value, str):
        return ({"role": "user", "content": _text(column, value)},)
    if not isinstance(value, list) or not value:
        raise DataError(
            f"{column} is {value!r}, neither text nor a list of messages: correct it, or remove the row"
        )
    messages = []
    for i, message in enumerate(value):
        where = f"{column}[{i}]"
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise DataError(
                f"{where} is {message!r}: write role (one of {', '.join(ROLES)}) and content"
            )
        surplus = [
            key
            for key, part in message.items()
            if key not in ("role", "content") and part is not None
        ]
        if surplus:
            raise DataError(f"{where} has keys {surplus}, which no prompt would show: remove them")
        messages.append(
            {"role": message["role"], "content": _text(f"{where}.content", message.get("content"))}
        )
    if messages[-1]["role"] != "user":
        raise DataError(
            f"{column} ends with a {messages[-1]['role']!r} message: the last one must be the user's"
        )
    return tuple(messages)


def _answer(column: str, value: Any) -> tuple[str, ...]:
    try:
        return tuple(_text(column, answer) for answer in normalize_answer(value))
    except DataError:
        raise
    except ValueError as error:
        raise DataError(f"{column}: {error}, or remove the row") from error


def _extra(row: Row, used: Iterable[str]) -> dict[str, Any]:
    """Return the other columns as JSON values (dates and the like as text), so that they can be written."""
    extra = {key: value for key, value in row.items() if key not in used}
    plain_values: dict[str, Any] = json.loads(json.dumps(extra, default=str))
    return plain_values
