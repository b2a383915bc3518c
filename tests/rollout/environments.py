"""Environments of the tests, by import path."""


def counts_turns(problem, messages):
    """Answers two turns with words, the second in two messages, and ends the third."""
    turns = sum(message["role"] == "assistant" for message in messages)
    if turns == 1:
        return [{"role": "tool", "content": "w60 w61"}]
    if turns == 2:
        return [{"role": "tool", "content": "w62"}, {"role": "user", "content": "w63 <|end|>"}]
    return []


def never_ends(problem, messages):
    return [{"role": "user", "content": "w60"}]


def silent(problem, messages):
    return []


def fails(problem, messages):
    raise RuntimeError("out of order")


def replies_text(problem, messages):
    return "w60"
