"""Chunks: each from an empty engine, whole or not at all, and never twice."""

from functools import partial

import pytest

from spiral_mega.algorithm.sampling_plan import SamplingPlan
from spiral_mega.errors import UserError
from spiral_mega.evaluation.chunked_sampling import Sampling, sample
from spiral_mega.evaluation.grading import grade
from spiral_mega.evaluation.store import Store
from spiral_mega.rewards import VerifierPool
from spiral_mega.rollout.pipeline import Interrupted
from tests.rollout.scripted import ScriptedEngine, first_come, pipeline_of, problem, settings
from tests.support.tiny_models import tiny_tokenizer

SAMPLING = Sampling(SamplingPlan(3), (), ())
PROBLEMS = [problem(f"p{i}", f"w{i} w80") for i in range(5)]


class ResetRecorder(ScriptedEngine):
    """An engine that records when its prefix cache is reset."""

    def reset_prefix_cache(self):
        assert not self.has_unfinished()
        self.events.append(("reset", None))


@pytest.fixture(scope="module")
def verifier():
    with VerifierPool(5.0, 1, ("exact",)) as shared:
        yield shared


def run(folder, verifier, runtime, interrupted=lambda engine: False):
    """Sample all problems, two a chunk; what the engine saw."""
    engine = ResetRecorder(first_come)
    config = settings(rollout={"engine.exchange_steps": 1})
    pipeline = pipeline_of(
        engine, verifier, config, plan=SAMPLING.plan, interrupted=lambda: interrupted(engine)
    )
    grading = partial(grade, token_budgets=(), verifier=verifier, tokenizer=tiny_tokenizer())
    try:
        sample(SAMPLING, PROBLEMS, pipeline, grading, Store(folder), runtime, chunk=2, seed=7)
        stopped = False
    except Interrupted:
        stopped = True
    return [each for each in engine.events if each[0] in ("reset", "add")], stopped


def files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("chunk_*")}


def test_each_chunk_begins_with_an_empty_engine_and_is_sampled_once(tmp_path, verifier, runtime):
    events, stopped = run(tmp_path, verifier, runtime)
    assert not stopped
    assert [kind for kind, _ in events] == ["reset", "add", "add"] * 2 + ["reset", "add"]
    records = [
        each.problem for chunk in range(3) for each in Store(tmp_path).read("search3", chunk)
    ]
    assert records == [each.id for each in PROBLEMS]
    assert run(tmp_path, verifier, runtime) == ([], False)


def test_what_a_stop_interrupts_leaves_nothing_and_what_follows_is_as_if_there_had_been_none(
    tmp_path, verifier, runtime
):
    run(tmp_path / "whole", verifier, runtime)
    stops = lambda engine: sum(kind == "done" for kind, _ in engine.events) >= 8  # noqa: E731
    _, stopped = run(tmp_path / "truncated", verifier, runtime, stops)
    assert stopped
    assert {path.name[:12] for path in files(tmp_path / "truncated")} == {"chunk_000000"}
    events, _ = run(tmp_path / "truncated", verifier, runtime)
    assert [kind for kind, _ in events].count("reset") == 2
    assert files(tmp_path / "truncated") == files(tmp_path / "whole")


def test_a_try_on_more_ranks_leaves_no_traces_behind(tmp_path, verifier, runtime):
    store = Store(tmp_path)
    store.write_traces("search3", 0, 5, [])
    run(tmp_path, verifier, runtime)
    assert {path.name for path in tmp_path.rglob("*.parquet")} == {
        f"chunk_00000{i}.rank0.parquet" for i in range(3)
    }


def test_a_folder_belongs_to_one_evaluation(tmp_path):
    store = Store(tmp_path)
    store.claim({"seed": 0, "rollout": {"sampling": {"temperature": 1.0}}})
    store.claim({"seed": 0, "rollout": {"sampling": {"temperature": 1.0}}})
    with pytest.raises(UserError, match=r"rollout\.sampling\.temperature was 1\.0 and is 0\.5"):
        store.claim({"seed": 0, "rollout": {"sampling": {"temperature": 0.5}}})
    (tmp_path / "evaluation.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        store.claim({})
