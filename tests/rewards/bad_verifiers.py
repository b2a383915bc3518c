"""Users' reward functions that do what they should not, for the tests to load by import path."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
import time

Answer = tuple[str, ...]
not_a_function = 7


def one_argument(response: str) -> float:
    return 1.0


def length(response: str, answer: Answer) -> float:
    return float(len(response))


def sleeps_forever(response: str, answer: Answer) -> float:
    time.sleep(1e9)
    return 1.0


def holds_the_interpreter(response: str, answer: Answer) -> float:
    return float(9**9**9**9 > 0)


def sleeps(response: str, answer: Answer) -> float:
    time.sleep(float(response))
    return 1.0


def exits(response: str, answer: Answer) -> float:
    os._exit(int(response))


def raises(response: str, answer: Answer) -> float:
    raise {
        "memory": MemoryError,
        "exit": SystemExit,
        "recursion": RecursionError,
        "timeout": TimeoutError,
    }[response]


def segfaults(response: str, answer: Answer) -> float:
    ctypes.string_at(0)
    return 1.0


def allocates_64_gib(response: str, answer: Answer) -> float:
    return float(len(bytearray(64 * 1024**3)))


def returns(response: str, answer: Answer) -> object:
    return {"nan": float("nan"), "inf": float("inf"), "text": "1", "none": None, "true": True}[
        response
    ]


def process_id(response: str, answer: Answer) -> float:
    return float(os.getpid())


def session_id(response: str, answer: Answer) -> float:
    return float(os.getsid(0))


def core_limit(response: str, answer: Answer) -> float:
    return float(resource.getrlimit(resource.RLIMIT_CORE)[0])


def heavy_modules(response: str, answer: Answer) -> float:
    return float(
        sum(
            name in sys.modules for name in ("torch", "transformers", "numpy", "pandas", "pydantic")
        )
    )
