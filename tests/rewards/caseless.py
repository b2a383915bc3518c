"""A user's verifier that knows which of its answers are the same."""


def score(response, answer):
    return agree(response, answer)


def answer_of(response):
    return response.strip(".?") or None


def agree(response, answers):
    """A "yes" that takes for ever, to see that one bad comparison does not decide the others."""
    while "loop" in answers and "yes" in response:
        pass
    return float(answer_of(response).lower() in [answer.lower() for answer in answers])
