"""Episodes by hand: every trace is (reward, answer group, tokens)."""

from spiral_mega.traces import AGGREGATION, SEARCH, Episode, Problem, Trace

PROBLEM = Problem("p", ({"role": "user", "content": "?"},), ("1",), "exact")


def trace(component, index, reward, tokens, set_index=None, logprob=-1.0):
    ids = list(tokens)
    return Trace(
        component, index, [], ids, [logprob] * len(ids), "stop", "", set_index, float(reward)
    )


def episode(search, sets=(), answers=()):
    """The episode and its groups; `answers[l]` are the traces that answer sets[l]."""
    groups = [group for _, group, _ in search] + [group for each in answers for _, group, _ in each]
    made = Episode(
        PROBLEM,
        0,
        [trace(SEARCH, i, reward, tokens) for i, (reward, _, tokens) in enumerate(search)],
        list(sets),
        [
            [trace(AGGREGATION, i, reward, tokens, l) for i, (reward, _, tokens) in enumerate(each)]
            for l, each in enumerate(answers)
        ],
        index=0,
    )
    return made, groups


def right(group=0, tokens=(1,)):
    return (1, group, tokens)


def wrong(group=1, tokens=(2,)):
    return (0, group, tokens)
