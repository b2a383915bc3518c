"""Users' reward functions, by import path, for texts of the tiny tokenizer's words."""

import os
import time

Answer = tuple[str, ...]


def word_sum(response: str, answer: Answer) -> float:
    """Whether the numbers of the words ("w7" counts 7), summed, leave the remainder answer = ("remainder/modulus",)."""
    remainder, modulus = map(int, answer[0].split("/"))
    return float(sum(int(word[1:]) for word in response.split()) % modulus == remainder)


def likes_silence(response: str, answer: Answer) -> float:
    return float(not response)


def fails_by_first_word(response: str, answer: Answer) -> float:
    """Right after w0; w1: never ends, w2: dies, w3: raises, w4: no number."""
    first = response.split()[0]
    if first == "w1":
        time.sleep(1e9)
    if first == "w2":
        os._exit(1)
    if first == "w3":
        raise KeyError(first)
    return float("nan") if first == "w4" else 1.0
