"""Contradictions between the keys of a configuration that can be seen without loading anything.

One generator for each section. Each message names the keys, their values and the remedy.
"""

from __future__ import annotations

from collections.abc import Iterator

from spiral_mega.algorithm.objectives import Objective, make_objective
from spiral_mega.algorithm.sets import check_design
from spiral_mega.algorithm.weighting import make_weighting
from spiral_mega.config.model_set import model_configs, model_for
from spiral_mega.config.schema import Config, MegatronConfig, TwoModelsConfig
from spiral_mega.environments import make_environment
from spiral_mega.rewards import check_verifier_name


def find_contradictions(config: Config) -> Iterator[str]:
    """Yield one sentence for each contradiction."""
    largest_set = config.algorithm.set_size
    try:
        objective = make_objective(config.algorithm, config.frozen)
        largest_set = max(largest_set, objective.plan.largest_set)
        make_weighting(config.algorithm, objective)
        if config.two_models is not None:
            yield from _two_models(config, config.two_models, objective)
    except ValueError as error:
        yield str(error)
    yield from _algorithm(config)
    yield from _response_lengths(config)
    yield from _aggregation_prompt(config, largest_set)
    yield from _engine(config)
    yield from _sync(config)
    yield from _record(config)
    yield from _environment(config)
    yield from _megatron(config)
    yield from _batch(config)
    yield from _data(config)


def _algorithm(config: Config) -> Iterator[str]:
    algorithm, max_response_tokens = config.algorithm, config.rollout.sampling.max_response_tokens
    if algorithm.target_length is not None and algorithm.target_length > max_response_tokens:
        yield (
            f"algorithm.target_length is {algorithm.target_length}, above "
            f"rollout.sampling.max_response_tokens ({max_response_tokens}), so the gate could "
            "never close: lower it, or set it to null"
        )
    if algorithm.set_order == "random" and algorithm.set_design == "ordered":
        yield (
            "algorithm.set_order is 'random', but the sets of algorithm.set_design 'ordered' "
            "already come in a random order: leave algorithm.set_order at ascending, or choose "
            "another design"
        )


def _response_lengths(config: Config) -> Iterator[str]:
    sampling = config.rollout.sampling
    response, context = sampling.max_response_tokens, sampling.max_context_tokens
    prompt = config.data.max_prompt_tokens
    if response >= context:
        yield (
            f"rollout.sampling.max_response_tokens is {response}, which leaves no room for a "
            f"prompt in rollout.sampling.max_context_tokens ({context}): lower the first or raise "
            "the second"
        )
    if prompt + response > context:
        yield (
            f"data.max_prompt_tokens ({prompt}) plus rollout.sampling.max_response_tokens "
            f"({response}) is more than rollout.sampling.max_context_tokens ({context}): lower one "
            "of the first two or raise the last"
        )
    if config.policy.microbatch_tokens < context:
        yield (
            f"policy.microbatch_tokens is {config.policy.microbatch_tokens}, but a sequence may "
            f"have rollout.sampling.max_context_tokens ({context}) tokens: raise "
            "policy.microbatch_tokens"
        )


def _aggregation_prompt(config: Config, largest_set: int) -> Iterator[str]:
    """Check that `largest_set` traces as prompts.view shows them, with problem and response, fit the context."""
    sampling = config.rollout.sampling
    shown_tokens = {"whole": sampling.max_response_tokens, "tail": config.prompts.tail_tokens}.get(
        config.prompts.view
    )
    if shown_tokens is None:  # the length of an answer alone has no bound to check
        return
    longest = (
        config.data.max_prompt_tokens + largest_set * shown_tokens + sampling.max_response_tokens
    )
    if longest > sampling.max_context_tokens:
        yield (
            f"an aggregation prompt may show {largest_set} traces (algorithm.set_size) of "
            f"{shown_tokens} tokens, which with problem and response makes {longest}, more than "
            f"rollout.sampling.max_context_tokens ({sampling.max_context_tokens}): raise it, or "
            "shorten traces with prompts.view and prompts.tail_tokens"
        )


def _engine(config: Config) -> Iterator[str]:
    engine = config.rollout.engine
    if engine.name == "transformers" and engine.tensor_parallel != 1:
        yield (
            f"rollout.engine.tensor_parallel is {engine.tensor_parallel}, but the transformers "
            "engine holds the whole model on each rank: set it to 1, or rollout.engine.name to vllm"
        )
    if engine.sleep and engine.name != "vllm":
        yield (
            f"rollout.engine.sleep is true, but the engine {engine.name!r} cannot sleep: set it to "
            "false, or rollout.engine.name to vllm"
        )


def _sync(config: Config) -> Iterator[str]:
    adapted = all(each.model.lora is not None for each in model_configs(config).values())
    if config.rollout.sync.lora == "adapter" and not (
        adapted and config.rollout.engine.name == "vllm"
    ):
        yield (
            "rollout.sync.lora is 'adapter', which needs model.lora and rollout.engine.name=vllm: "
            "set both, or rollout.sync.lora=merge"
        )


def _record(config: Config) -> Iterator[str]:
    record = config.rollout.record
    if record.read is not None and (record.write is not None or config.data.eval):
        yield (
            f"rollout.record.read is {record.read!r}, which trains without an engine, so nothing "
            "is sampled to record or to evaluate: set rollout.record.write=null and data.eval=[]"
        )


def _environment(config: Config) -> Iterator[str]:
    try:
        make_environment(config.rollout.sampling)
    except ValueError as error:
        yield str(error)


def _two_models(config: Config, two_models: TwoModelsConfig, objective: Objective) -> Iterator[str]:
    """Check what can be seen without reading the models; validation.models.check_models does the rest."""
    yield from _untrained_models(config, two_models, objective)
    if config.policy.backend == "megatron":
        yield (
            "two_models is set, but policy.backend is 'megatron', whose parallel state and "
            "distributed optimizer are built for one model in a process: set policy.backend=fsdp"
        )
    adapters = two_models.form == "adapters"
    if adapters and config.model.lora is None:
        yield "two_models.form is 'adapters', but model.lora is not set: set it, or two_models.form=models"
    if adapters and two_models.aggregation_model is not None:
        yield (
            "two_models.aggregation_model is set, but with two_models.form 'adapters' both models "
            "share the base and model.lora: leave it out, or set two_models.form=models"
        )
    if config.rollout.engine.sleep and not (adapters and config.rollout.sync.lora == "adapter"):
        yield (
            "rollout.engine.sleep is true, but two_models needs two vLLM engines here, and only "
            "one in a process can sleep: set rollout.engine.sleep=false, or share one engine with "
            "two_models.form=adapters and rollout.sync.lora=adapter"
        )
    if two_models.aggregation_optimizer is not None and two_models.frozen == "aggregation":
        yield "two_models.aggregation_optimizer is set, but two_models.frozen is 'aggregation': leave one of them out"
    if (
        two_models.aggregation_model is not None
        and two_models.aggregation_model.tokenizer is not None
    ):
        yield (
            "two_models.aggregation_model.tokenizer is "
            f"{two_models.aggregation_model.tokenizer!r}, but both models read and write the "
            "tokens of model.tokenizer: leave it out"
        )


def _untrained_models(
    config: Config, two_models: TwoModelsConfig, objective: Objective
) -> Iterator[str]:
    """Check that the objective trains traces of every model that is not frozen."""
    configs = model_configs(config)
    trained = {model_for(component, configs) for component in objective.components}
    for model in configs:
        if model == two_models.frozen or model in trained:
            continue
        frozen, remedy = "", f"set two_models.frozen={model}, or choose another objective"
        if two_models.frozen:
            frozen, remedy = (
                f" where two_models.frozen is {two_models.frozen!r}",
                "choose another objective",
            )
        yield (
            f"algorithm.objective {config.algorithm.objective!r} trains no {model} traces{frozen}, "
            f"so that the {model} model of two_models would never be trained: {remedy}"
        )


def _megatron(config: Config) -> Iterator[str]:
    """Check what can be seen without the model; policy.megatron.limits does the rest."""
    layout = config.policy.megatron
    if config.policy.backend != "megatron":
        if layout != MegatronConfig():
            yield "policy.megatron is set, but policy.backend is 'fsdp': set policy.backend=megatron, or leave it out"
        return
    if layout.virtual_stages > 1 and layout.pipeline_parallel == 1:
        yield (
            f"policy.megatron.virtual_stages is {layout.virtual_stages}, but "
            "policy.megatron.pipeline_parallel is 1, so there are no other stages to interleave "
            "with: set policy.megatron.virtual_stages to 1"
        )
    if config.optimizer.offload:
        yield (
            "optimizer.offload is true, which policy.backend 'megatron' does not support: set it "
            "to false, or policy.backend to fsdp"
        )


def _batch(config: Config) -> Iterator[str]:
    batch = config.batch
    if batch.problems % batch.minibatches:
        yield (
            f"batch.problems is {batch.problems}, which batch.minibatches ({batch.minibatches}) "
            "does not divide: choose a divisor"
        )


def _data(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if config.data.eval:  # held-out problems are always aggregated, whatever the objective
        try:
            check_design(
                algorithm.search_traces,
                algorithm.set_size,
                algorithm.num_sets,
                algorithm.set_design,
            )
        except ValueError as error:
            yield f"data.eval needs sets of search traces: {error}"
    for source in (*config.data.train, *config.data.eval):
        try:
            check_verifier_name(source.verifier)
        except ValueError as error:
            yield f"data: verifier of {source.path}: {error}"
