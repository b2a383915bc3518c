"""How long a step takes: sampling by the rollout simulator, training by FLOPs and links, the rest by bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from spiral_mega.algorithm.objectives import make_objective
from spiral_mega.capacity import flops, megatron_time
from spiral_mega.capacity.flops import Work
from spiral_mega.capacity.hardware import LINK_SHARE, MEMORY_SHARE, TRAINING_SHARE, Machine
from spiral_mega.config import Config
from spiral_mega.errors import UserError
from spiral_mega.models.dimensions import Sizes, itemsize
from spiral_mega.rollout.pipeline import LAG, exchange_steps
from spiral_mega.simulation.schedule import SimPolicy, simulate
from spiral_mega.simulation.workload import LanguageModel, Lengths, Shape, SimProblem, engine_model, sample_problems

TEMPLATE_TOKENS = 160  # of an aggregation prompt, beside problem and traces


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step's parts, one after another; and the tokens that they are spent on."""

    sampling: float
    training: float
    optimizer: float
    sync: float
    sampled_tokens: int
    trained_tokens: float

    @property
    def total(self) -> float:
        return self.sampling + self.training + self.optimizer + self.sync


def step_time(
    config: Config, sizes: Sizes, machine: Machine, nodes: int, lengths: Lengths, seed: int = 0, *, exact: bool = True
) -> StepTime:
    """The expected step on `nodes` nodes, every problem effective. `exact`: simulate the whole batch; otherwise an
    engine's share of it on one engine, which is quicker and leaves out that engines wait for one another."""
    world = nodes * machine.node_gpus
    problems = sample_batch(config, lengths, seed)
    work = sum((tree_work(problem) for problem in problems), Work(0, 0, 0))
    return StepTime(
        sampling=_sampling(config, sizes, machine, world, problems, exact),
        training=(
            megatron_time.training(config, sizes, machine, world, work)
            if config.policy.backend == "megatron"
            else _training(config, sizes, machine, nodes, work)
        ),
        optimizer=7 * 4 * sizes.trained / world / (machine.bandwidth * MEMORY_SHARE),
        sync=itemsize(config.policy.param_dtype) * sizes.total / _link(machine, nodes),
        sampled_tokens=sum(sum(problem.lengths()) for problem in problems),
        trained_tokens=work.tokens,
    )


def sample_batch(config: Config, lengths: Lengths, seed: int) -> list[SimProblem]:
    """A batch's problems, their lengths cut at the configuration's limits.

    Raises UserError for a recipe of several levels of sets, which the simulator does not know.
    """
    sampled = make_objective(config.algorithm).plan
    shown = sampled.levels if sampled.answers else ()
    if len(shown) > 1:
        raise UserError(
            f"algorithm.objective {config.algorithm.objective!r} has several levels, which are not simulated"
        )
    shape = Shape(
        problems=config.batch.problems,
        search_traces=sampled.search_traces,
        num_sets=0,
        max_tokens=config.rollout.sampling.max_response_tokens,
    )
    if shown:
        design = "uniform" if shown[0].design == "independent" else shown[0].design
        shape = replace(
            shape,
            num_sets=shown[0].sets,
            set_size=shown[0].set_size,
            aggregation_traces=sampled.answers,
            set_design=design,
        )
    high = min(lengths.prompt_high, config.data.max_prompt_tokens)
    return sample_problems(shape, replace(lengths, prompt_high=high, prompt_low=min(lengths.prompt_low, high)), seed)


def tree_work(problem: SimProblem) -> Work:
    """What training on a problem's token tree takes. Sets that begin with the same traces share them."""
    tokens = problem.prompt + sum(problem.search)
    pairs = problem.prompt**2 / 2 + sum(length * (problem.prompt + length / 2) for length in problem.search)
    seen: set[tuple[int, ...]] = set()
    for members, answers in zip(problem.sets, problem.aggregation, strict=True):
        context = 0.0
        for k in range(len(members) + 1):
            new = problem.prompt + TEMPLATE_TOKENS if k == 0 else problem.search[members[k - 1]]
            if members[:k] not in seen:
                seen.add(members[:k])
                tokens += new
                pairs += new * (context + new / 2)
            context += new
        tokens += sum(answers)
        pairs += sum(length * (context + length / 2) for length in answers)
    return Work(float(tokens), float(sum(problem.lengths())), pairs)


def _sampling(
    config: Config, sizes: Sizes, machine: Machine, world: int, problems: Sequence[SimProblem], exact: bool
) -> float:
    rollout = config.rollout
    read = sizes.total if sizes.tied else sizes.total - sizes.vocabulary * sizes.hidden
    model = LanguageModel("", read, sizes.layers, sizes.heads, sizes.kv_heads, sizes.head_dim)
    capacity = rollout.engine.kv_cache_mb * 2**20 * rollout.engine.tensor_parallel / sizes.kv_bytes
    engine = replace(
        engine_model(model, machine.gpu, rollout.engine.tensor_parallel),
        capacity=capacity,
        max_sequences=rollout.engine.max_num_seqs,
    )
    if sizes.experts:  # all of them are read in a step, and a token is multiplied with few
        busy = sizes.active / read
        engine = replace(engine, sequence=busy * engine.sequence, prefill=busy * engine.prefill)
    engines = world // rollout.engine.tensor_parallel
    schedule = SimPolicy("trainer", ordered=True, exchange=exchange_steps(rollout), lag=LAG)
    if not exact:
        share = problems[: max(1, round(len(problems) / engines))]
        return simulate(schedule, share, engine, 1, len(share)).makespan
    return simulate(schedule, problems, engine, engines, len(problems)).makespan


def _training(config: Config, sizes: Sizes, machine: Machine, nodes: int, work: Work) -> float:
    """The longer of arithmetic and of FSDP's collectives, which run beside it, with all ranks equally busy."""
    world = nodes * machine.node_gpus
    policy, item = config.policy, itemsize(config.policy.param_dtype)
    frozen = config.model.lora is not None
    total = flops.training(sizes, work, frozen=frozen, checkpointing=policy.activation_checkpointing)
    if config.algorithm.kl is not None:
        total += flops.forward(sizes, work)
    arithmetic = total / world / (machine.flops * TRAINING_SHARE)
    rounds = -(-work.tokens // (policy.microbatch_tokens * world))
    moved = 2 * item * sizes.total + 4 * sizes.trained  # gathered forward and backward, reduced in float32
    return float(max(arithmetic, rounds * moved / _link(machine, nodes)))


def _link(machine: Machine, nodes: int) -> float:
    """Bytes a second into one GPU from all the others, in a ring."""
    return LINK_SHARE * (machine.node_link if nodes == 1 else machine.network * machine.node_gpus)
