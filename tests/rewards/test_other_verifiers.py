from __future__ import annotations

import json
import random

import pytest

from spiral_mega.rewards import check_verifier_name, number_path, text_answer

GAME = {
    "start": 3,
    "target": 10,
    "moves": [[2, 0], [1, 1]],
    "modulus": 17,
}  # doubling and adding one, mod 17


def play(response: str, **changes: object) -> float:
    return number_path.score(response, (json.dumps(GAME | changes),))


@pytest.mark.parametrize(
    ("response", "changes"),
    [("3 4 5 10", {}), (" 3\n4\t5 10 ", {"max_hops": 3}), ("3 6 7 8 9 10", {})],
)
def test_a_path_of_allowed_moves_to_the_target_wins(
    response: str, changes: dict[str, object]
) -> None:
    assert play(response, **changes) == 1.0


@pytest.mark.parametrize(
    ("response", "changes"),
    [
        ("4 5 10", {}),  # begins elsewhere
        ("3 4 5", {}),  # ends elsewhere
        ("3 10", {}),  # no such move
        ("3 4 5 10", {"max_hops": 2}),
        ("3", {"target": 3}),  # no hop
        ("", {}),
        ("3 4 5 ten", {}),
        ("3 4 5 10.", {}),
        ("3,4,5,10", {}),
        ("3 4 5 10 </s>", {}),
        ("٣ 4 5 10", {}),  # a digit, but not one of ours
        ("3 4 5 27", {"target": 27}),  # congruent, but outside the ring
        ("3 " + "9" * 5000 + " 10", {}),
    ],
)
def test_anything_else_loses(response: str, changes: dict[str, object]) -> None:
    assert play(response, **changes) == 0.0


def test_random_walks_win_and_one_wrong_number_loses() -> None:
    rng = random.Random(0)
    for _ in range(200):
        modulus = rng.randint(50, 500)
        moves = [[rng.randint(1, 9), rng.randint(0, 9)] for _ in range(3)]
        walk = [rng.randrange(modulus)]
        for _ in range(rng.randint(1, 7)):
            a, b = rng.choice(moves)
            walk.append((a * walk[-1] + b) % modulus)
        game = json.dumps(
            {"start": walk[0], "target": walk[-1], "moves": moves, "modulus": modulus}
        )
        assert number_path.score(" ".join(map(str, walk)), (game,)) == 1.0
        hop = rng.randrange(1, len(walk))
        allowed = {(a * walk[hop - 1] + b) % modulus for a, b in moves}
        walk[hop] = rng.choice([n for n in range(modulus) if n not in allowed])
        assert number_path.score(" ".join(map(str, walk)), (game,)) == 0.0


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("Paris\n", 1.0),
        ("paris", 0.0),
        ("It is \\boxed{ Paris }.", 1.0),
        ("\\boxed{Rome} Paris", 0.0),
        ("<think>Paris", 0.0),
    ],
)
def test_exact_compares_the_box_or_else_the_whole_final_text(response: str, right: float) -> None:
    assert text_answer.score(response, ("Paris",)) == right


@pytest.mark.parametrize("name", ["math", "exact", "arithmetic", "bad_verifiers:length"])
def test_verifiers_that_exist_are_accepted(name: str) -> None:
    check_verifier_name(name)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("maths", "known verifiers are math, exact, arithmetic, or package.module:function"),
        ("", "there is no verifier ''"),
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("bad_verifiers:missing", "no attribute 'missing'"),
        ("bad_verifiers:not_a_function", "function"),
        ("bad_verifiers:one_argument", "does not take 2 arguments"),
        ("__main__:f", "move it to a module"),
    ],
)
def test_a_verifier_that_cannot_serve_is_refused_by_name_and_reason(name: str, reason: str) -> None:
    with pytest.raises(ValueError, match="verifier") as refusal:
        check_verifier_name(name)
    assert repr(name) in str(refusal.value)
    assert reason in str(refusal.value)
