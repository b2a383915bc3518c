"""Responses that attack the verifier of kind `math`: each costs at most the limit, runs nothing and scores 0."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from spiral_mega.rewards import VerifierPool

HOSTILE = {
    "python tower": "\\boxed{9**9**9**9}",
    "latex tower": "\\boxed{9^{9^{9^{9}}}}",
    "tower without a box": "9**9**9**9",
    "tower in a fraction": "\\boxed{\\frac{1}{9^{9^{9}}}}",
    "huge sum": "\\boxed{\\sum_{n=1}^{9999999} \\frac{1}{n^{n}}}",
    "huge product": "\\boxed{\\prod_{n=1}^{19999} n^{n}}",
    "big factorial": "\\boxed{9!!!!}",
    "big binomial": "\\boxed{\\binom{10^{9}}{5 \\cdot 10^{8}}}",
    "hard integral": "\\boxed{\\int_{0}^{1} \\sin(x^{x^{x}}) e^{\\cos(x)} dx}",
    "long expansion": "\\boxed{(a+b+c+d+e+f+g)^{9999}}",
    "million braces": "\\boxed{" + "{" * 10**6 + "5" + "}" * 10**6 + "}",
    "million open braces": "\\boxed{" + "{" * 10**6,
    "million fractions": "\\boxed{" + "\\frac{1}{" * 10**5 + "}" * 10**5 + "}",
    "megabyte of digits": "\\boxed{" + "7" * 10**6 + "}",
    "fifty thousand boxes": "\\boxed{4}" * 50_000,
    "nul bytes": "\\boxed{5\x00}\x00",
    "only nul bytes": "\x00" * 1000,
    "lone surrogate": "\\boxed{\ud800}",
    "unpaired": "\\boxed{5}} {{ \\boxed{\\{5}",
    "empty": "\\boxed{}",
    "blank": "\\boxed{   }",
    "nothing": "",
    "format": "\\boxed{{0.__class__}} \\boxed{%s%n}",
    "bidi": "\\boxed{\u202e5\u202c\u200b6}",
    "roots of roots": "\\boxed{" + "\\sqrt" * 300 + "2}",
    "many roots": "\\boxed{" + "+".join(f"\\sqrt{{{n}}}" for n in range(2, 200)) + "}",
    "power of a root": "\\boxed{(\\sqrt{2}+1)^{19999}-(\\sqrt{2}+1)^{19998}}",
    "exponential of an exponential": "\\boxed{e^{e^{e^{20}}}}",
    "sine of a power": "\\boxed{\\sin(10^{19999})}",
    "gamma of a root": "\\boxed{(\\sqrt{2})!+\\binom{10^{9}}{\\sqrt{2}}}",
    "words": "\\boxed{5 \\text{" + "a b c d " * 200 + "}}",
    "commas": "\\boxed{" + "1," * 900 + "}",
    "signs": "\\boxed{" + "-" * 1900 + "5}",
    "factorials": "\\boxed{" + "5!" * 600 + "}",
    "fractions without braces": "\\boxed{" + "\\frac" * 300 + "1}",
    "scripts": "\\boxed{" + "x_" * 900 + "}",
    "bars": "\\boxed{" + "|" * 1900 + "}",
    "brackets": "\\boxed{" + "(1," * 35 + ")" * 35 + "}",
    "unions": "\\boxed{" + " \\cup ".join(f"({n},{n + 1})" for n in range(150)) + "}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_answer_costs_at_most_the_limit_and_earns_nothing(
    verifier: VerifierPool, name: str
) -> None:
    verifier.submit("\\boxed{1}", "1").result()  # a process is warm
    began = time.perf_counter()
    verdict = verifier.submit(HOSTILE[name], "57").result()
    assert time.perf_counter() - began < verifier.time_limit_s + 2.0
    assert verdict.reward == 0.0
    assert verdict.status in ("ok", "timeout")


@pytest.mark.parametrize("kind", ["math", "exact"])
def test_an_answer_that_is_code_is_not_run(
    verifier: VerifierPool, tmp_path: Path, kind: str
) -> None:
    marker = tmp_path / "ran"
    codes = [
        f"__import__('os').system('touch {marker}')",
        f"eval(\"__import__('os').system('touch {marker}')\")",
        f"open('{marker}','w')",
        f"\\input{{|touch {marker}}}",
        f"\\immediate\\write18{{touch {marker}}}",
    ]
    for code in codes:
        for response in (
            code,
            f"\\boxed{{{code}}}",
            f"\\boxed{{\\text{{{code}}}}}",
            f"$$\\boxed{{${code}$}}$$",
        ):
            assert verifier.submit(response, "57", kind).result().reward == 0.0
    assert not marker.exists()
