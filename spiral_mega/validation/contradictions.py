"""Contradictions in a configuration that no single key shows and that can be seen without loading anything."""

from __future__ import annotations

from collections.abc import Iterator

from spiral_mega.algorithm.objectives import Objective, make_objective
from spiral_mega.algorithm.sets import check_design
from spiral_mega.algorithm.weighting import make_weighting
from spiral_mega.config.model_set import model_configs, model_for
from spiral_mega.config.schema import Config, MegatronConfig
from spiral_mega.environments import make_environment
from spiral_mega.rewards import check_verifier_name


def find_contradictions(config: Config) -> Iterator[str]:
    """What no single key shows: one sentence each, naming key, value and remedy."""
    rollout, algorithm, batch = config.rollout, config.algorithm, config.batch
    if rollout.sampling.max_response_tokens >= rollout.sampling.max_context_tokens:
        yield (
            f"rollout.sampling.max_response_tokens is {rollout.sampling.max_response_tokens}, which leaves no room for a prompt in "
            f"rollout.sampling.max_context_tokens ({rollout.sampling.max_context_tokens}): lower the first or raise the second"
        )
    if config.data.max_prompt_tokens + rollout.sampling.max_response_tokens > rollout.sampling.max_context_tokens:
        yield (
            f"data.max_prompt_tokens ({config.data.max_prompt_tokens}) plus rollout.sampling.max_response_tokens "
            f"({rollout.sampling.max_response_tokens}) is more than rollout.sampling.max_context_tokens ({rollout.sampling.max_context_tokens}): "
            "lower one of the first two or raise the last"
        )
    largest = algorithm.set_size
    try:
        objective = make_objective(algorithm, config.frozen)
        largest = max(largest, objective.plan.largest_set)
        make_weighting(algorithm, objective)
        yield from _two_models(config, objective)
    except ValueError as error:
        yield str(error)
    shown = {"whole": rollout.sampling.max_response_tokens, "tail": config.prompts.tail_tokens}.get(config.prompts.view)
    if shown is not None:
        longest = config.data.max_prompt_tokens + largest * shown + rollout.sampling.max_response_tokens
        if longest > rollout.sampling.max_context_tokens:
            yield (
                f"an aggregation prompt may show {largest} traces (algorithm.set_size) of {shown} tokens, "
                f"which with problem and response makes {longest}, more than rollout.sampling.max_context_tokens "
                f"({rollout.sampling.max_context_tokens}): raise it, or shorten traces by prompts.view and prompts.tail_tokens"
            )
    if config.policy.microbatch_tokens < rollout.sampling.max_context_tokens:
        yield (
            f"policy.microbatch_tokens is {config.policy.microbatch_tokens}, but a sequence may have "
            f"rollout.sampling.max_context_tokens ({rollout.sampling.max_context_tokens}) tokens: raise policy.microbatch_tokens"
        )
    if rollout.engine.name == "transformers" and rollout.engine.tensor_parallel != 1:
        yield (
            f"rollout.engine.tensor_parallel is {rollout.engine.tensor_parallel}, but the transformers engine holds the whole model "
            "on each rank: set it to 1, or rollout.engine.name to vllm"
        )
    adapted = all(each.model.lora is not None for each in model_configs(config).values())
    if rollout.sync.lora == "adapter" and not (adapted and rollout.engine.name == "vllm"):
        yield (
            "rollout.sync.lora is 'adapter', which needs model.lora and rollout.engine.name=vllm: set both, or rollout.sync.lora=merge"
        )
    if rollout.engine.sleep and rollout.engine.name != "vllm":
        yield f"rollout.engine.sleep is true, but the engine {rollout.engine.name!r} cannot sleep: set it to false, or use vllm"
    if rollout.record.read is not None and (rollout.record.write is not None or config.data.eval):
        yield (
            f"rollout.record.read is {rollout.record.read!r}, which trains without an engine, so nothing is sampled to record or "
            "to evaluate: set rollout.record.write=null and data.eval=[]"
        )
    if algorithm.target_length is not None and algorithm.target_length > rollout.sampling.max_response_tokens:
        yield (
            f"algorithm.target_length is {algorithm.target_length}, above rollout.sampling.max_response_tokens "
            f"({rollout.sampling.max_response_tokens}), so the gate could never close: lower it, or set it to null"
        )
    if algorithm.set_order == "random" and algorithm.set_design == "ordered":
        yield (
            "algorithm.set_order is 'random', but the sets of algorithm.set_design 'ordered' come in a random order of "
            "their own: leave algorithm.set_order at ascending, or choose another design"
        )
    yield from _megatron(config)
    if batch.problems % batch.minibatches:
        yield (
            f"batch.problems is {batch.problems}, which batch.minibatches ({batch.minibatches}) does not divide: "
            "choose a divisor"
        )
    if config.data.eval:  # held-out problems are always aggregated
        try:
            check_design(algorithm.search_traces, algorithm.set_size, algorithm.num_sets, algorithm.set_design)
        except ValueError as error:
            yield f"data.eval needs sets of search traces: {error}"
    try:
        make_environment(rollout.sampling)
    except ValueError as error:
        yield str(error)
    for source in (*config.data.train, *config.data.eval):
        try:
            check_verifier_name(source.verifier)
        except ValueError as error:
            yield f"data: kind of {source.path}: {error}"


def _two_models(config: Config, objective: Objective) -> Iterator[str]:
    """What two models cannot be, as far as it shows without reading them; run.check_context finds the rest."""
    two = config.two_models
    if two is None:
        return
    configs = model_configs(config)
    for model in configs:
        if model != two.frozen and not any(model_for(each, configs) == model for each in objective.components):
            yield (
                f"algorithm.objective {config.algorithm.objective!r} trains no {model} traces"
                + (f" where two_models.frozen is {two.frozen!r}" if two.frozen else "")
                + f", so that two_models has nothing to train the {model} model by: "
                + ("choose another objective" if two.frozen else f"set two_models.frozen={model}, or another objective")
            )
    if config.policy.backend == "megatron":
        yield (
            "two_models is set, but policy.backend is 'megatron', whose parallel state and distributed optimizer are "
            "built for one model in a process: use fsdp"
        )
    if two.form == "adapters":
        if config.model.lora is None:
            yield "two_models.form is 'adapters', but model.lora is not set: set it, or two_models.form=models"
        if two.aggregation_model is not None:
            yield (
                "two_models.aggregation_model is set, but two_models.form is 'adapters', whose base and model.lora are "
                "both models': leave it out, or set two_models.form=models"
            )
    if config.rollout.engine.sleep and not (two.form == "adapters" and config.rollout.sync.lora == "adapter"):
        yield (
            "rollout.engine.sleep is true, but two_models takes two vLLM engines here, of which only one in a process can "
            "sleep: set rollout.engine.sleep=false, or share one by two_models.form=adapters and rollout.sync.lora=adapter"
        )
    if two.aggregation_optimizer is not None and two.frozen == "aggregation":
        yield ("two_models.aggregation_optimizer is set, but two_models.frozen is 'aggregation': leave one of them out")
    if two.aggregation_model is not None and two.aggregation_model.tokenizer is not None:
        yield (
            f"two_models.aggregation_model.tokenizer is {two.aggregation_model.tokenizer!r}, but both models read and "
            "write the tokens of model.tokenizer: leave it out"
        )


def _megatron(config: Config) -> Iterator[str]:
    """What policy.backend=megatron does not do, as far as it shows without the model; check_layout finds the rest."""
    layout = config.policy.megatron
    if config.policy.backend != "megatron":
        if layout != MegatronConfig():
            yield "policy.megatron is set, but policy.backend is 'fsdp': set policy.backend=megatron, or leave it out"
        return
    if layout.virtual_stages > 1 and layout.pipeline_parallel == 1:
        yield (
            f"policy.megatron.virtual_stages is {layout.virtual_stages}, but pipeline_parallel is 1: there is no other "
            "stage to wait for; set virtual_stages to 1"
        )
    if config.optimizer.offload:
        yield "optimizer.offload is true, which policy.backend 'megatron' does not do: set it to false, or use fsdp"
