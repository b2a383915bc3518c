"""This rank's stages of a model on megatron-core: token trees in, log-probs out."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from accelerate import init_empty_weights
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from transformers import AutoModelForCausalLM

from spiral_mega.config import Config, ModelConfig
from spiral_mega.distributed.collectives import gather_objects
from spiral_mega.distributed.runtime import Runtime
from spiral_mega.errors import UserError
from spiral_mega.kernels import linear_logprob
from spiral_mega.kernels.logits import LinearLogprob
from spiral_mega.policy.megatron.context_parallel import ContextShard
from spiral_mega.policy.megatron.families import ParamMapping, param_mappings
from spiral_mega.policy.megatron.megatron_lora import (
    Adapters,
    ParallelLoraHead,
    adapts_head,
    add_adapters,
)
from spiral_mega.policy.megatron.megatron_weights import ShardMap, ShardReader, by_global_name
from spiral_mega.policy.megatron.modules import TreeParams, decoder_spec
from spiral_mega.policy.megatron.parallel_layout import ParallelLayout
from spiral_mega.policy.megatron.transformer_config import transformer_config


class TreeGPTModel(GPTModel):  # type: ignore[misc]
    """megatron-core's GPTModel with a forward pass that takes token trees and returns log-probs."""

    rotary: torch.nn.Module  # transformers' own, so that it scales frequencies as the config says
    layout: ParallelLayout
    real_vocab_size: int  # without padding

    def forward(self, shard: ContextShard, temperature: float) -> torch.Tensor | LinearLogprob:
        """Compute this stage.

        The last stage returns log-probs and entropies [U] of the micro-batch's distinct response
        tokens under softmax(logits / temperature), the same on all its ranks. Other stages return
        hidden states [T, 1, H] of this rank's rows, which the schedule sends on.
        """
        batch = shard.batch
        # The rotation is computed in float32 and rounded, as in transformers.
        cos, sin = self.rotary(torch.empty(0, dtype=self.config.params_dtype), batch.position_ids)
        hidden = self.decoder(
            hidden_states=self.embedding(batch.input_ids, batch.position_ids)
            if self.pre_process
            else None,
            attention_mask=None,
            packed_seq_params=TreeParams(shard, cos[0], sin[0]),
        )
        if not self.post_process:
            return hidden
        return shard.gather_logprobs(self._logprobs(hidden, shard, temperature))

    def _logprobs(
        self,
        hidden: torch.Tensor,
        shard: ContextShard,
        temperature: float,
    ) -> LinearLogprob:
        """Compute the log-probs that this rank's rows predict, from the last layer's `hidden` states."""
        if self.config.sequence_parallel:
            # The head gives every rank the whole gradient, so each keeps its own rows of it:
            # nothing to sum.
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.layout.tensor_group
            )
        weight = (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else None
        )
        rows = hidden[:, 0][shard.batch.logit_indices]
        lora = getattr(self.output_layer, "lora", None)
        return linear_logprob(
            rows,
            self.output_layer.weight if weight is None else weight,
            shard.batch.labels,
            adapter=lora(rows) if isinstance(lora, ParallelLoraHead) else None,
            temperature=temperature,
            vocab_parallel_group=self.layout.tensor_group,
            vocab_size=self.real_vocab_size,
        )


class MegatronModel(NamedTuple):
    """This rank's stages of a model, and its adapters if it has some: then these alone are trained."""

    stages: list[TreeGPTModel]
    weights: ShardMap
    adapters: Adapters | None

    @property
    def trained(self) -> ShardMap:
        return self.weights if self.adapters is None else self.adapters.shards


def build_model(
    config: Config,
    model_config: ModelConfig,
    hf_config: Any,
    layout: ParallelLayout,
    runtime: Runtime,
) -> MegatronModel:
    """Build this rank's stages of the model of `model_config`, with the weights of its checkpoint.

    Collective. Raises UserError, on every rank, if the weights do not load on one.
    """
    with init_empty_weights(include_buffers=False):
        twin = AutoModelForCausalLM.from_config(hf_config)
    lora = model_config.lora
    # An adapted head is a separate weight in engines and exports. Here, where the base is frozen,
    # nothing is copied.
    tied = bool(hf_config.tie_word_embeddings) and not adapts_head(lora)
    stages = _build_stages(config, hf_config, layout, runtime, tied=tied)
    for stage in stages:
        stage.rotary = twin.model.rotary_emb.to(runtime.device)
    mappings = param_mappings(hf_config, tied=tied)
    weights = _load_weights(model_config.path, stages, mappings, hf_config, layout, tied=tied)
    if lora is None:
        return MegatronModel(stages, weights, None)
    return MegatronModel(
        stages, weights, add_adapters(stages, twin, mappings, lora, config.run.seed, weights)
    )


def _build_stages(
    config: Config, hf_config: Any, layout: ParallelLayout, runtime: Runtime, *, tied: bool
) -> list[TreeGPTModel]:
    """Build this rank's stages with uninitialized weights.

    `tied`: the head shares the embedding's weight.
    """
    megatron_config = transformer_config(hf_config, config)
    attention = runtime.choose_attention(megatron_config.params_dtype, config.policy.attention)
    transformer_engine = config.policy.megatron.spec == "te"
    vocabulary, count = hf_config.vocab_size, config.policy.megatron.virtual_stages
    stages = []
    for number in range(count):
        virtual_stage = number if count > 1 else None
        model = TreeGPTModel(
            megatron_config,
            decoder_spec(
                megatron_config, attention, virtual_stage, transformer_engine=transformer_engine
            ),
            vocab_size=-(-vocabulary // layout.tensor_size) * layout.tensor_size,
            max_sequence_length=hf_config.max_position_embeddings,
            pre_process=layout.first_stage and number == 0,
            post_process=layout.last_stage and number == count - 1,
            share_embeddings_and_output_weights=tied,
            position_embedding_type="none",
            vp_stage=virtual_stage,
        )
        if hf_config.tie_word_embeddings and not tied and model.pre_process and model.post_process:
            model.output_layer.weight = model.embedding.word_embeddings.weight
        model.layout, model.real_vocab_size = layout, vocabulary
        stages.append(model.to(runtime.device))
    return stages


def _load_weights(
    path: str,
    stages: list[TreeGPTModel],
    mappings: list[ParamMapping],
    hf_config: Any,
    layout: ParallelLayout,
    *,
    tied: bool,
) -> ShardMap:
    """Read this rank's shards of the checkpoint at `path`.

    An error on one rank is raised on all: none must wait.
    """
    problem, reader = "", None
    try:
        reader = ShardReader(path, tied=bool(hf_config.tie_word_embeddings))
    except Exception as error:  # malformed files fail in many ways
        problem = f"{type(error).__name__}: {error}"
    _raise_together(path, problem)
    assert reader is not None
    weights = None
    try:
        parameters = by_global_name(
            stages, layout, lambda stage: stage.named_parameters(remove_duplicate=False)
        )
        groups = hf_config.num_key_value_heads // layout.tensor_size
        weights = ShardMap(parameters, mappings, reader.shape, layout, groups, tied=tied)
    except ValueError as error:  # on every rank: mappings and files are the same everywhere
        problem = str(error)
    _raise_together(path, problem)
    assert weights is not None
    try:
        weights.load(reader.read)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    reader.close()
    _raise_together(path, problem)
    return weights


def _raise_together(path: str, problem: str) -> None:
    """Raise UserError on every rank if one has a `problem`. Collective."""
    if problems := [each for each in gather_objects(problem) if each]:
        raise UserError(
            f"the weights at model.path {path!r} do not load ({problems[0]}): copy the model "
            "again, or name another"
        )
