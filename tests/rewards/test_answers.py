from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spiral_mega.rewards import normalize_answer


@pytest.mark.parametrize(
    ("answer", "texts"),
    [
        ("025", ("025",)),
        (142.0, ("142",)),
        ("142.0", ("142",)),
        (-4.0, ("-4",)),
        (-0.0, ("0",)),
        (0.5, ("0.5",)),
        (7, ("7",)),
        (True, ("True",)),
        (["9.6\n"], ("9.6",)),
        (("4.4e7\n", "4.4 \\times 10^7\n"), ("4.4e7", "4.4 \\times 10^7")),
        (["7.5 \\times 10^7", "7.5 \\times 10^7\n"], ("7.5 \\times 10^7",)),
        (np.array(["9.6\n", "9.60"], dtype=object), ("9.6", "9.60")),
        (np.float64(142.0), ("142",)),
        ([np.int64(3), 4.0], ("3", "4")),
        ("1,234", ("1,234",)),
    ],
)
def test_every_form_of_a_ground_truth_becomes_text(answer: Any, texts: tuple[str, ...]) -> None:
    assert normalize_answer(answer) == texts


@pytest.mark.parametrize(
    "answer",
    ["", " \n", [], (), [""], ["1", " "], None, float("nan"), float("inf"), {"a": 1}, [[1]], b"1"],
)
def test_an_answer_that_says_nothing_is_refused_with_its_value(answer: Any) -> None:
    shown = answer[-1] if isinstance(answer, list) and answer else answer
    with pytest.raises(ValueError, match="give a string, a finite number") as refusal:
        normalize_answer(answer)
    assert repr(shown) in str(refusal.value)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.one_of(st.text(), st.integers(), st.floats(allow_nan=False, allow_infinity=False)),
        min_size=1,
    )
)
def test_normalising_twice_changes_nothing(answer: list[Any]) -> None:
    try:
        once = normalize_answer(answer)
    except ValueError:
        return
    assert normalize_answer(once) == once
