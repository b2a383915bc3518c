"""A user's verifier that knows which of its answers are the same."""


def score(response, answer):
    return agree(response, answer)


def answer_of(response):
    return response.strip(".?").lower() or None


def agree(response, answers):
    return float(answer_of(response) in [answer.lower() for answer in answers])
