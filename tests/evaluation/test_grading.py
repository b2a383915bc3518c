"""What is graded of an episode, against sampling and verifying it anew."""

import pytest

from spiral_mega.algorithm.sampling_plan import Level, SamplingPlan
from spiral_mega.evaluation.grading import grade
from spiral_mega.models.tokenizer import load_tokenizer
from spiral_mega.models.weights import pretrained_weights
from spiral_mega.prompts.prompter import Prompter
from spiral_mega.rewards import VerifierPool
from spiral_mega.rollout import build_engine
from spiral_mega.rollout.episode_builder import Task
from spiral_mega.rollout.pipeline import Pipeline
from tests.rollout.launches import PROBLEMS, real_config
from tests.rollout.verifiers import word_sum
from tests.support.tiny_models import END_ID

BUDGETS = (1, 2, 4, 8)


@pytest.fixture(scope="module")
def parts(runtime):
    """The real tiny model's engine, and what goes with it."""
    config = real_config()
    tokenizer = load_tokenizer(config.model)
    engine = build_engine(config, frozenset([END_ID]), runtime)
    engine.load_weights(pretrained_weights(config.model.path))
    with VerifierPool(10.0, 1, ("exact",)) as verifier:
        yield config, tokenizer, engine, verifier


def sample(parts, plan):
    config, tokenizer, engine, verifier = parts
    prompter = Prompter(config.prompts, tokenizer)
    pipeline = Pipeline(
        engine, prompter, verifier, tokenizer, config.algorithm, config.rollout, plan=plan
    )
    tasks = [Task(each, -1, (3, "eval", each.id)) for each in PROBLEMS]
    return pipeline.run(tasks)


def test_a_budget_read_off_the_longest_response_is_what_sampling_with_it_gives(parts):
    _, tokenizer, _, verifier = parts
    graded = [
        grade(episode, BUDGETS, verifier, tokenizer) for episode in sample(parts, SamplingPlan(6))
    ]
    lengths = {length for each in graded for length in each.tokens["generated"]}
    assert lengths == {4, 8}, "some end by themselves, most at the limit"
    for budget in BUDGETS:
        anew = sample(parts, SamplingPlan(6, max_tokens=budget))
        assert [each.truncated_rewards[str(budget)] for each in graded] == [
            [t.reward for t in e.search] for e in anew
        ]
    assert [each.truncated_rewards["8"] for each in graded] == [each.rewards for each in graded]
    assert [each.truncated_rewards["1"] for each in graded] != [
        each.truncated_rewards["8"] for each in graded
    ]


def test_the_facts_on_each_trace_stand_in_the_order_of_the_episodes_traces(parts):
    _, tokenizer, _, verifier = parts
    plan = SamplingPlan(4, levels=(Level(3, 2, "independent"), Level(2, 3, "independent")))
    for episode in sample(parts, plan):
        graded = grade(episode, (), verifier, tokenizer)
        traces = episode.traces()
        assert len(traces) == 9
        assert graded.tokens["prompt"] == [len(trace.prompt_ids) for trace in traces]
        assert graded.tokens["generated"] == [len(trace.response_ids) for trace in traces]
        if episode.problem.verifier != "exact":
            assert graded.rewards == [
                word_sum(trace.text, episode.problem.answer) for trace in traces
            ]
        same = [[a == b for b in graded.groups] for a in graded.groups]
        assert same == [[a.text.strip() == b.text.strip() for b in traces] for a in traces], (
            "text kinds group by text"
        )
