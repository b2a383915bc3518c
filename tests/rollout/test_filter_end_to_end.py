"""`filter` keeps the problems that the model sometimes solves, as plain sampling of the same seeds says."""

from statistics import fmean

import pytest

from spiral_mega.config import DataSource
from spiral_mega.data.problems import load_source
from spiral_mega.models.tokenizer import load_tokenizer
from spiral_mega.models.weights import pretrained_weights
from spiral_mega.prompts.prompter import Prompter
from spiral_mega.rollout import build_engine
from spiral_mega.rollout.engine import Request, RequestKey
from spiral_mega.seeds import derive_seed
from spiral_mega.traces import SEARCH
from tests.rollout.engine_models import generate
from tests.rollout.launches import (
    FILTER_SAMPLES,
    FILTERED,
    filter_output,
    of_ranks,
    real_config,
    run_folder,
)
from tests.rollout.verifiers import word_sum
from tests.support.tiny_models import END_ID


@pytest.fixture(scope="module")
def means(runtime):
    """The mean reward of each problem by the engine alone: no pipeline, no verifier, no ranks."""
    config = real_config()
    tokenizer = load_tokenizer(config.model)
    prompter = Prompter(config.prompts, tokenizer)
    engine = build_engine(config, frozenset([END_ID]), runtime)
    engine.load_weights(pretrained_weights(config.model.path))
    requests = [
        Request(
            RequestKey(each.id, SEARCH),
            prompter.search_prompt(each),
            FILTER_SAMPLES,
            seed_of(each, config.run.seed),
            8,
        )
        for each in FILTERED
    ]
    samples = generate(engine, requests)
    return {
        each.id: fmean(
            word_sum(
                tokenizer.decode(samples[each.id, i].token_ids, skip_special_tokens=True),
                each.answer,
            )
            for i in range(FILTER_SAMPLES)
        )
        for each in FILTERED
    }


def seed_of(problem, run_seed):
    return derive_seed(run_seed, "filter", problem.id, "search", -1)


@pytest.fixture(scope="module")
def kept():
    of_ranks(2, "filter")
    return load_source(DataSource(path=str(filter_output(2))))


def test_two_ranks_keep_the_problems_that_are_sometimes_solved_in_their_order(means, kept):
    expected = [each for each in FILTERED if 0 < means[each.id] < 1]
    assert 0 < len(expected) < len(FILTERED)
    assert [each.id for each in kept] == [each.id for each in expected]
    for loaded, original in zip(kept, expected, strict=True):
        assert (loaded.messages, loaded.answer) == (original.messages, original.answer)
        assert loaded.verifier == original.verifier


def test_what_was_left_out_is_counted_in_the_log(means, kept):
    hard, easy = (sum(mean == bound for mean in means.values()) for bound in (0.0, 1.0))
    log = (run_folder() / "logs" / "rank0.log").read_text()
    assert f"{len(kept)} problems kept, {hard} too hard, {easy} too easy" in log
    assert f"{len(FILTERED)} of {len(FILTERED)} problems sampled" in log
