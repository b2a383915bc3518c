"""What was recorded is replayed whole, on any number of ranks; a step without a record fails before anything runs."""

from dataclasses import replace

import pytest

from spiral_mega.algorithm.objectives import make_objective
from spiral_mega.distributed.runtime import Runtime
from spiral_mega.errors import UserError
from spiral_mega.rollout.batch import AssignCredit, Batch
from spiral_mega.rollout.recording import Recorder, Replayer
from spiral_mega.telemetry.trace_file import trace_path
from tests.rollout.scripted import ScriptedEngine, pipeline_of, problem, settings, shuffled, task

CONFIG = settings(algorithm={"target_length": 5})
CREDIT = make_objective(CONFIG.algorithm).assign_credit
STEPS = range(2)
VERIFIER = "tests.rollout.verifiers:word_sum"


def rank_of(runtime: Runtime, rank: int, world: int) -> Runtime:
    return replace(runtime, rank=rank, world_size=world)


class Collected:
    """Hands out this rank's part of batches made before."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def collect(self, step: int, assign_credit: AssignCredit) -> Batch:
        return self.batches[step]


@pytest.fixture(scope="module")
def batches(runtime, verifier) -> list[Batch]:
    """Two steps of six episodes of which two are not kept, with credit and gates."""
    made = []
    for step in STEPS:
        tasks = [
            task(problem(f"p{i}", verifier=VERIFIER, answer=f"{i % 3}/3"), step=step)
            for i in range(6)
        ]
        sampled = pipeline_of(ScriptedEngine(shuffled(step)), verifier, CONFIG).run(tasks)
        for episode in sampled:
            CREDIT(episode)
        kept = [each for each in sampled if each.index not in (1, 4)]
        made.append(
            Batch(sampled, kept, [0, 2, 3, 5], num_prompts=6, num_effective=4, num_cancelled=3)
        )
    return made


def part(batch: Batch, rank: int, world: int) -> Batch:
    of_rank = lambda items: [each for each in items if each.index % world == rank]  # noqa: E731
    return replace(batch, sampled=of_rank(batch.sampled), kept=of_rank(batch.kept))


@pytest.mark.parametrize(("recording", "replaying"), [(1, 1), (2, 2), (2, 1), (1, 3), (3, 2)])
def test_a_replay_is_the_batch_itself_on_any_number_of_ranks(
    runtime, tmp_path, batches, recording, replaying
):
    for rank in range(recording):
        parts = Collected([part(batch, rank, recording) for batch in batches])
        recorder = Recorder(parts, str(tmp_path), rank_of(runtime, rank, recording))
        assert [recorder.collect(step, CREDIT) for step in STEPS] == parts.batches
    for rank in range(replaying):
        replayer = Replayer(str(tmp_path), STEPS, rank_of(runtime, rank, replaying))
        for step in STEPS:
            replayed = replayer.collect(step, CREDIT)
            expected = part(batches[step], rank, replaying)
            for got, made in zip(replayed.sampled, expected.sampled, strict=True):
                for a, b in zip(got.traces(), made.traces(), strict=True):
                    assert a.logprobs == pytest.approx(
                        b.logprobs, rel=1e-6
                    )  # float32 holds what an engine gives
                    a.logprobs = b.logprobs
            assert replayed == expected


def test_credit_is_that_of_the_replaying_objective(runtime, tmp_path, batches):
    Recorder(Collected(batches), str(tmp_path), runtime).collect(0, CREDIT)
    grpo = CONFIG.algorithm.model_copy(update={"objective": "grpo", "target_length": None})
    batch = Replayer(str(tmp_path), range(1), runtime).collect(
        0, make_objective(grpo).assign_credit
    )
    for episode in batch.sampled:
        mean = sum(trace.reward for trace in episode.search) / len(episode.search)
        assert [trace.advantage for trace in episode.search] == pytest.approx(
            [t.reward - mean for t in episode.search]
        )


def test_a_missing_or_broken_record_is_an_error_at_the_start(runtime, tmp_path, batches):
    for rank in (0, 1):
        parts = Collected([part(each, rank, 2) for each in batches])
        Recorder(parts, str(tmp_path), rank_of(runtime, rank, 2)).collect(0, CREDIT)
    with pytest.raises(UserError, match=r"no record of step 2 at .*step_000002"):
        Replayer(str(tmp_path), STEPS, runtime)
    Replayer(str(tmp_path), range(1), runtime)
    trace_path(tmp_path, 1, 1).write_bytes(b"PAR1 and no more")
    with pytest.raises(UserError, match=r"no record of step 1 at .*rank1"):
        Replayer(str(tmp_path), range(1), runtime)
    trace_path(tmp_path, 1, 1).unlink()
    with pytest.raises(UserError, match=r"rollout\.record"):
        Replayer(str(tmp_path), range(1), runtime)
