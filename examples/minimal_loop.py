"""SPIRAL on one page: sample, aggregate, assign credit, pack, update. One process on a CPU, under a minute.

    python examples/minimal_loop.py

The trainer (spiral_mega/train.py) runs the same steps on many ranks. It also starts each aggregation as soon as its set
is complete, replaces problems without a signal, shards model and optimizer, saves checkpoints and evaluates.
"""

from __future__ import annotations

import random
from collections import defaultdict

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from spiral_mega.algorithm.losses import LossInputs, make_loss
from spiral_mega.algorithm.objectives import make_objective
from spiral_mega.algorithm.sampling_plan import SamplingPlan
from spiral_mega.algorithm.weighting import component_totals, make_weighting
from spiral_mega.config import Config
from spiral_mega.data.problems import load_source
from spiral_mega.kernels import linear_logprob
from spiral_mega.models.tokenizer import load_tokenizer, stop_ids
from spiral_mega.packing import attention  # noqa: F401  (registers the attention "tree_torch")
from spiral_mega.packing.microbatches import split_into_microbatches
from spiral_mega.packing.training_sequence import SequenceKey, TrainingSequence
from spiral_mega.packing.tree_batch import TreeBatch, pack
from spiral_mega.prompts.prompter import Prompter
from spiral_mega.rewards.number_path import score
from spiral_mega.rollout.engine import Request, RequestKey
from spiral_mega.rollout.transformers_engine import TransformersEngine
from spiral_mega.seeds import derive_seed
from spiral_mega.traces import SEARCH, Episode, Problem, Trace
from spiral_mega.validation.load import load_config


def main(steps: int = 20, num_problems: int = 32) -> tuple[PreTrainedModel, list[dict[str, float]]]:
    """Train the demo's model for a few steps; return it, and the metrics of each step."""
    config = load_config("configs/demo.yaml")
    objective = make_objective(config.algorithm)  # SPIRAL: any other recipe works as well
    weighting = make_weighting(config.algorithm, objective)
    problems = load_source(config.data.train[0])
    tokenizer = load_tokenizer(config.model)
    prompter = Prompter(config.prompts, tokenizer)
    policy = load_model(config, "tree_torch")
    optimizer = torch.optim.AdamW(policy.parameters(), lr=config.optimizer.lr, weight_decay=0.0)
    engine = TransformersEngine(
        load_model(config, "sdpa"),
        temperature=config.rollout.sampling.temperature,
        stop_ids=stop_ids(config.model, tokenizer),
        max_num_seqs=config.rollout.engine.max_num_seqs,
    )
    history = []
    for step in range(steps):
        # 1. Sample: search traces of each problem, then aggregation traces for sets of them.
        chosen = random.Random(step).sample(problems, num_problems)
        episodes = sample_episodes(
            chosen, step, objective.plan, config, engine, prompter, tokenizer
        )

        # 2. Credit: rewards become advantages. From here on nothing depends on the recipe.
        for episode in episodes:
            objective.assign_credit(episode)

        # 3. Weigh each trace, and pack: a prefix that traces share is computed once.
        totals = component_totals(episodes, objective.components)
        sequences = []
        for episode in episodes:
            for position, trace in enumerate(episode.traces()):
                if trace.effective:
                    key, weight = (
                        SequenceKey(episode.index, position),
                        weighting.trace_weight(trace, totals),
                    )
                    sequences.append(to_training_sequence(trace, key, weight))
        microbatches = split_into_microbatches(sequences, config.policy.microbatch_tokens)

        # 4. Update: one optimizer step on the sum over micro-batches.
        optimizer.zero_grad()
        losses = [backward(policy, pack(members), config) for members in microbatches]
        grad_norm = torch.nn.utils.clip_grad_norm_(
            policy.parameters(), config.optimizer.max_grad_norm
        )
        optimizer.step()

        # 5. Sync: the next step samples from the new weights.
        engine.load_weights(policy.state_dict().items())

        metrics = mean_rewards(episodes) | {
            "train/loss": sum(losses),
            "optim/grad_norm": float(grad_norm),
        }
        print(
            f"step {step + 1}/{steps}",
            *(f"{name}={value:.3f}" for name, value in metrics.items()),
            flush=True,
        )
        history.append(metrics)
    return policy, history


def sample_episodes(
    problems: list[Problem],
    step: int,
    plan: SamplingPlan,
    config: Config,
    engine: TransformersEngine,
    prompter: Prompter,
    tokenizer: PreTrainedTokenizerBase,
) -> list[Episode]:
    """Sample N1 search traces a problem, draw K sets of them, and sample N2 aggregation traces a set."""

    def request(problem: Problem, key: RequestKey, prompt: list[int], num_samples: int) -> None:
        seed = derive_seed(config.run.seed, step, problem.id, key.component, str(key.set_index))
        engine.add(
            Request(key, prompt, num_samples, seed, config.rollout.sampling.max_response_tokens)
        )
        prompts[key] = prompt

    def finished_traces() -> dict[RequestKey, list[Trace]]:
        traces: dict[RequestKey, list[Trace]] = defaultdict(list)
        while engine.has_unfinished():
            for sample in engine.step():
                key, response, logprobs = sample.key, sample.token_ids, sample.logprobs
                text = tokenizer.decode(response, skip_special_tokens=True)
                trace = Trace(
                    key.component,
                    sample.index,
                    prompts[key],
                    response,
                    logprobs,
                    sample.finish,
                    text,
                )
                trace.set_index, trace.reward = (
                    key.set_index,
                    score(text, problems[key.episode].answer),
                )
                traces[key].append(trace)
        return {key: sorted(group, key=lambda trace: trace.index) for key, group in traces.items()}

    prompts: dict[RequestKey, list[int]] = {}
    for index, problem in enumerate(problems):
        request(
            problem, RequestKey(index, SEARCH), prompter.search_prompt(problem), plan.search_traces
        )
    search = finished_traces()
    sets = {}
    for index, problem in enumerate(problems):
        sets[index] = plan.draw_sets(
            np.random.default_rng(derive_seed(config.run.seed, step, problem.id, "sets"))
        )
        for set_index, drawn in enumerate(sets[index]):
            members = [search[RequestKey(index, SEARCH)][position] for position in drawn.members]
            prompt = prompter.aggregation_prompt(problem, members)
            request(
                problem,
                RequestKey(index, drawn.component, set_index),
                prompt,
                plan.aggregation_traces,
            )
    answers = finished_traces()
    episodes = []
    for index, problem in enumerate(problems):
        groups = [
            answers[RequestKey(index, drawn.component, i)] for i, drawn in enumerate(sets[index])
        ]
        members_of_sets = [drawn.members for drawn in sets[index]]
        search_traces = search[RequestKey(index, SEARCH)]
        episodes.append(Episode(problem, step, search_traces, members_of_sets, groups, index=index))
    return episodes


def to_training_sequence(trace: Trace, key: SequenceKey, weight: float) -> TrainingSequence:
    """Return what the update needs of a trace: tokens, the sampler's log-probs, an advantage and a weight."""
    return TrainingSequence(
        key, trace.prompt_ids, trace.response_ids, trace.logprobs, trace.advantage, weight
    )


def backward(policy: PreTrainedModel, batch: TreeBatch, config: Config) -> float:
    """Add the gradient of one micro-batch; return its loss."""
    output = policy.base_model(
        batch.input_ids, position_ids=batch.position_ids, **batch.attention_kwargs()
    )
    hidden_UH = output.last_hidden_state[0, batch.logit_indices]
    head_VH, temperature = (
        policy.get_output_embeddings().weight,
        config.rollout.sampling.temperature,
    )
    logprobs_U = linear_logprob(hidden_UH, head_VH, batch.labels, temperature=temperature).logprob
    logprobs_R = logprobs_U[
        batch.gather_indices
    ]  # traces that share a token read the same log-prob
    inputs = LossInputs(logprobs_R, batch.sampler_logprobs, batch.advantages, batch.sequence_ids)
    loss = (make_loss(config.algorithm)(inputs).loss_R * batch.weights).sum()
    loss.backward()
    return float(loss.detach())


def load_model(config: Config, attention_name: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        config.model.path, dtype=torch.float32, attn_implementation=attention_name
    )


def mean_rewards(episodes: list[Episode]) -> dict[str, float]:
    rewards = defaultdict(list)
    for episode in episodes:
        for trace in episode.traces():
            rewards[f"reward/{trace.component}"].append(trace.reward)
    return {name: float(np.mean(values)) for name, values in rewards.items()}


if __name__ == "__main__":
    main()
