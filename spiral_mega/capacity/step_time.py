"""Time of a training step: sampling by the rollout simulator, training by FLOPs and links, the rest by bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add

from spiral_mega.algorithm.objectives import make_objective
from spiral_mega.capacity import flops, megatron_time
from spiral_mega.capacity.flops import Work
from spiral_mega.capacity.hardware import LINK_SHARE, MEMORY_SHARE, TRAINING_SHARE, Machine
from spiral_mega.config import Config
from spiral_mega.errors import UserError
from spiral_mega.models.dimensions import ModelSizes, itemsize
from spiral_mega.rollout.exchange import LAG, exchange_interval
from spiral_mega.simulation.schedule import SimPolicy, simulate
from spiral_mega.simulation.workload import (
    EngineModel,
    LanguageModel,
    Lengths,
    Shape,
    SimProblem,
    engine_model,
    sample_problems,
)

TEMPLATE_TOKENS = 160  # of an aggregation prompt, in addition to problem and traces


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step's phases, one after another, and the tokens that they process."""

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
    config: Config,
    sizes: ModelSizes,
    machine: Machine,
    nodes: int,
    lengths: Lengths,
    seed: int = 0,
    *,
    exact: bool = True,
) -> StepTime:
    """Forecast a step on `nodes` nodes with every problem effective.

    `exact` simulates the whole batch. Otherwise one engine samples its share of the batch, which is
    faster but leaves out that engines wait for one another.
    """
    world = nodes * machine.node_gpus
    problems = sample_batch(config, lengths, seed)
    work = reduce(add, map(tree_work, problems), Work(0, 0, 0))
    if config.policy.backend == "megatron":
        training = megatron_time.training_seconds(config, sizes, machine, world, work)
    else:
        training = _fsdp_training_seconds(config, sizes, machine, nodes, work)
    return StepTime(
        sampling=_sampling_seconds(config, sizes, machine, world, problems, exact),
        training=training,
        optimizer=7 * 4 * sizes.trained_params / world / (machine.bandwidth * MEMORY_SHARE),
        sync=itemsize(config.policy.param_dtype) * sizes.params / _link(machine, nodes),
        sampled_tokens=sum(sum(problem.lengths()) for problem in problems),
        trained_tokens=work.tokens,
    )


def sample_batch(config: Config, lengths: Lengths, seed: int) -> list[SimProblem]:
    """Draw a batch of problems, with lengths cut at the configuration's limits.

    Raises UserError for a recipe with several levels of sets, which the simulator does not support.
    """
    plan = make_objective(config.algorithm).plan
    levels = plan.levels if plan.aggregation_traces else ()
    if len(levels) > 1:
        raise UserError(
            f"algorithm.objective {config.algorithm.objective!r} has several levels, which are not "
            "simulated"
        )
    shape = Shape(
        problems=config.batch.problems,
        search_traces=plan.search_traces,
        num_sets=0,
        max_tokens=config.rollout.sampling.max_response_tokens,
    )
    if levels:
        (level,) = levels
        shape = replace(
            shape,
            num_sets=level.num_sets,
            set_size=level.set_size,
            aggregation_traces=plan.aggregation_traces,
            set_design="uniform" if level.design == "independent" else level.design,
        )
    longest = min(lengths.prompt_high, config.data.max_prompt_tokens)
    bounded = replace(lengths, prompt_high=longest, prompt_low=min(lengths.prompt_low, longest))
    return sample_problems(shape, bounded, seed)


def tree_work(problem: SimProblem) -> Work:
    """Count the work of training on a problem's token tree. Sets that begin with the same traces share them."""
    tokens = problem.prompt + sum(problem.search)
    pairs = problem.prompt**2 / 2 + sum(
        length * (problem.prompt + length / 2) for length in problem.search
    )
    seen: set[tuple[int, ...]] = set()
    for members, answers in zip(problem.sets, problem.aggregation, strict=True):
        context = 0.0
        for count in range(len(members) + 1):
            prefix = members[:count]
            added = problem.search[prefix[-1]] if prefix else problem.prompt + TEMPLATE_TOKENS
            if prefix not in seen:
                seen.add(prefix)
                tokens += added
                pairs += added * (context + added / 2)
            context += added
        tokens += sum(answers)
        pairs += sum(length * (context + length / 2) for length in answers)
    return Work(float(tokens), float(sum(problem.lengths())), pairs)


def _sampling_seconds(
    config: Config,
    sizes: ModelSizes,
    machine: Machine,
    world: int,
    problems: Sequence[SimProblem],
    exact: bool,
) -> float:
    rollout, engine = config.rollout, config.rollout.engine
    engines = world // engine.tensor_parallel
    simulated = _simulated_engine(config, sizes, machine)
    schedule = SimPolicy("trainer", ordered=True, exchange=exchange_interval(rollout), lag=LAG)
    if exact:
        return simulate(schedule, problems, simulated, engines, len(problems)).makespan
    share = problems[: max(1, round(len(problems) / engines))]
    return simulate(schedule, share, simulated, 1, len(share)).makespan


def _simulated_engine(config: Config, sizes: ModelSizes, machine: Machine) -> EngineModel:
    engine = config.rollout.engine
    read = sizes.params if sizes.tied else sizes.params - sizes.vocabulary * sizes.hidden
    model = LanguageModel("", read, sizes.layers, sizes.heads, sizes.kv_heads, sizes.head_dim)
    simulated = replace(
        engine_model(model, machine.gpu, engine.tensor_parallel),
        capacity=engine.kv_cache_mb * 2**20 * engine.tensor_parallel / sizes.kv_bytes,
        max_sequences=engine.max_num_seqs,
    )
    if not sizes.experts:
        return simulated
    # A step reads all experts, but a token is multiplied with few of them.
    active_share = sizes.active_params / read
    return replace(
        simulated,
        sequence=active_share * simulated.sequence,
        prefill=active_share * simulated.prefill,
    )


def _fsdp_training_seconds(
    config: Config, sizes: ModelSizes, machine: Machine, nodes: int, work: Work
) -> float:
    """Return the longer of arithmetic and FSDP's collectives, which overlap, with all ranks equally busy."""
    world = nodes * machine.node_gpus
    policy, item = config.policy, itemsize(config.policy.param_dtype)
    frozen = config.model.lora is not None
    total = flops.training(
        sizes, work, frozen=frozen, checkpointing=policy.activation_checkpointing
    )
    if config.algorithm.kl is not None:
        total += flops.forward(sizes, work)
    arithmetic = total / world / (machine.flops * TRAINING_SHARE)
    microbatches = -(-work.tokens // (policy.microbatch_tokens * world))
    moved = (
        2 * item * sizes.params + 4 * sizes.trained_params
    )  # gathered forward and backward, reduced in float32
    return float(max(arithmetic, microbatches * moved / _link(machine, nodes)))


def _link(machine: Machine, nodes: int) -> float:
    """Return the bytes/s into one GPU from all the others, in a ring."""
    return LINK_SHARE * (machine.node_link if nodes == 1 else machine.network * machine.node_gpus)
