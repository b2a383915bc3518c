"""SPIRAL on one page: sample, aggregate, assign credit, pack, update. One process on a CPU, under a minute.

    python examples/minimal_loop.py

The trainer (spiral_mega/train.py) makes the same steps on many ranks. It also replaces problems
without a signal, shards model and optimizer, saves checkpoints and evaluates.
"""

from __future__ import annotations

import random
from collections import defaultdict
from statistics import fmean

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from spiral_mega.algorithm.losses import LossInputs, make_loss
from spiral_mega.algorithm.objectives import make_objective
from spiral_mega.algorithm.weighting import (
    component_totals,
    make_weighting,
    training_sequences,
)
from spiral_mega.config import Config
from spiral_mega.config.model_set import DEFAULT_MODEL
from spiral_mega.data.problems import load_source
from spiral_mega.kernels import linear_logprob
from spiral_mega.models.tokenizer import load_tokenizer, stop_ids
from spiral_mega.packing import attention  # noqa: F401  (registers the attention "tree_torch")
from spiral_mega.packing.microbatches import split_into_microbatches
from spiral_mega.packing.tree_batch import TreeBatch, pack
from spiral_mega.prompts.prompter import Prompter
from spiral_mega.rewards import VerifierPool
from spiral_mega.rollout.engine import Sampler
from spiral_mega.rollout.episode_builder import EpisodeBuilder, SamplingContext, Task
from spiral_mega.rollout.transformers_engine import TransformersEngine
from spiral_mega.traces import Episode, Problem
from spiral_mega.validation.load import load_config


def main(steps: int = 20, num_problems: int = 32) -> tuple[PreTrainedModel, list[dict[str, float]]]:
    """Train the demo's model for a few steps; return it, and the metrics of each step."""
    config = load_config("configs/demo.yaml")
    objective = make_objective(config.algorithm)  # SPIRAL; any other recipe works as well
    weighting = make_weighting(config.algorithm, objective)
    problems = load_source(config.data.train[0])
    tokenizer = load_tokenizer(config.model)
    policy = load_model(config, "tree_torch")
    parameters = list(policy.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=config.optimizer.lr, weight_decay=0.0)
    engine = TransformersEngine(
        load_model(config, "sdpa"),
        temperature=config.rollout.sampling.temperature,
        stop_ids=stop_ids(config.model, tokenizer),
        max_num_seqs=config.rollout.engine.max_num_seqs,
    )
    history = []
    with VerifierPool(verifiers=("arithmetic",)) as verifier:
        prompter, set_order = Prompter(config.prompts, tokenizer), config.algorithm.set_order
        context = SamplingContext(
            prompter, verifier, tokenizer, objective.plan, set_order, config.rollout
        )
        for step in range(steps):
            # 1. Sample search traces, aggregate sets of them, and verify all.
            chosen = random.Random(step).sample(problems, num_problems)
            episodes = sample_episodes(chosen, step, context, engine)

            # 2. Turn rewards into advantages. From here on nothing depends on the recipe.
            for episode in episodes:
                objective.assign_credit(episode)

            # 3. Weigh each trace that has an advantage.
            totals = component_totals(episodes, objective.components)
            sequences = training_sequences(
                episodes, weighting, totals, [DEFAULT_MODEL], include_ineffective=False
            )[DEFAULT_MODEL]

            # 4. Update: one optimizer step on the sum over all micro-batches.
            optimizer.zero_grad()
            microbatches = split_into_microbatches(sequences, config.policy.microbatch_tokens)
            loss = sum(backward(policy, pack(members), config) for members in microbatches)
            norm = torch.nn.utils.clip_grad_norm_(parameters, config.optimizer.max_grad_norm)
            optimizer.step()

            # 5. Sync: the next step samples from the new weights.
            engine.load_weights(policy.state_dict().items())

            history.append(
                mean_rewards(episodes) | {"train/loss": loss, "optim/grad_norm": float(norm)}
            )
            values = (f"{name}={value:.3f}" for name, value in history[-1].items())
            print(f"step {step + 1}/{steps}", *values, flush=True)
    return policy, history


def sample_episodes(
    problems: list[Problem], step: int, context: SamplingContext, engine: Sampler
) -> list[Episode]:
    """Sample N1 search traces for each problem, and N2 aggregation traces for each of K sets.

    A set is requested as soon as its last member has finished.
    """
    builders = []
    for index, problem in enumerate(problems):
        task = Task(problem, step, seed_parts=(step, problem.id))
        builders.append(EpisodeBuilder(context, index, task, verify_rewards=True))
        engine.add(builders[index].first_request())
    while engine.has_unfinished():
        for sample in engine.step():
            for request in builders[sample.key.episode].add_sample(sample):
                engine.add(request)
    return [builder.build() for builder in builders]


def backward(policy: PreTrainedModel, batch: TreeBatch, config: Config) -> float:
    """Add the gradient of one micro-batch, whose shared prefixes are computed once; return its loss."""
    tokens = {"input_ids": batch.input_ids, "position_ids": batch.position_ids}
    output = policy.base_model(**tokens, **batch.attention_kwargs())
    hidden_UH = output.last_hidden_state[0, batch.logit_indices]
    head_VH = policy.get_output_embeddings().weight
    temperature = config.rollout.sampling.temperature
    logprobs_U = linear_logprob(hidden_UH, head_VH, batch.labels, temperature=temperature).logprob
    logprobs_R = logprobs_U[
        batch.gather_indices
    ]  # traces that share a token read the same log-prob
    inputs = LossInputs(logprobs_R, batch.sampler_logprobs, batch.advantages, batch.sequence_ids)
    loss = (make_loss(config.algorithm)(inputs).loss_R * batch.weights).sum()
    loss.backward()
    return float(loss.detach())


def load_model(config: Config, attention_name: str) -> PreTrainedModel:
    """Load the demo's model in float32."""
    options = {"dtype": torch.float32, "attn_implementation": attention_name}
    return AutoModelForCausalLM.from_pretrained(config.model.path, **options)


def mean_rewards(episodes: list[Episode]) -> dict[str, float]:
    """Return the mean reward of each component's traces."""
    rewards = defaultdict(list)
    for episode in episodes:
        for trace in episode.traces():
            rewards[f"reward/{trace.component}"].append(trace.reward)
    return {name: fmean(values) for name, values in rewards.items()}


if __name__ == "__main__":
    main()
