"""A stage of the model, from embedding to log-probs, that takes token trees."""

from __future__ import annotations

import logging
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
from spiral_mega.policy.megatron.context_parallel import Share
from spiral_mega.policy.megatron.families import Entry, model_entries
from spiral_mega.policy.megatron.megatron_lora import Adapters, LowRankHead, adapts_head, add_adapters
from spiral_mega.policy.megatron.megatron_weights import CheckpointReader, ShardMap, named_over_model
from spiral_mega.policy.megatron.modules import TreeParams, decoder_spec
from spiral_mega.policy.megatron.parallel_layout import Layout
from spiral_mega.policy.megatron.transformer_config import transformer_config

log = logging.getLogger(__name__)


class TreeGPTModel(GPTModel):  # type: ignore[misc]
    """megatron-core's GPTModel, of which the forward pass is this one: trees in, log-probs out."""

    rotary: torch.nn.Module  # transformers' own, so that every scaling of the frequencies is the checkpoint's
    layout: Layout
    real_vocab_size: int

    def forward(self, share: Share, temperature: float) -> torch.Tensor | LinearLogprob:
        """Of the last stage: log-probs and entropies [U] of the micro-batch's distinct response tokens under
        softmax(logits / temperature), the same on all ranks of a stage. Of others: hidden states [T, 1, H] of this
        rank's rows, which the schedule hands on."""
        batch = share.batch
        # The rotation is computed in float32 and rounded, as transformers does.
        cos, sin = self.rotary(torch.empty(0, dtype=self.config.params_dtype), batch.position_ids)
        hidden = self.decoder(
            hidden_states=self.embedding(batch.input_ids, batch.position_ids) if self.pre_process else None,
            attention_mask=None,
            packed_seq_params=TreeParams(share, cos[0], sin[0]),
        )
        if not self.post_process:
            return hidden
        if self.config.sequence_parallel:
            # The head gives every rank the whole gradient, so each keeps its own rows of it: nothing to sum.
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.layout.tensor_group
            )
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        weight = self.output_layer.weight if weight is None else weight
        rows, low_rank = hidden[:, 0][batch.logit_indices], getattr(self.output_layer, "lora", None)
        mine = linear_logprob(
            rows,
            weight,
            batch.labels,
            adapter=low_rank(rows) if isinstance(low_rank, LowRankHead) else None,
            temperature=temperature,
            vocab_parallel_group=self.layout.tensor_group,
            vocab_size=self.real_vocab_size,
        )
        return share.whole_head(mine)


class Shards(NamedTuple):
    """This rank's stages of a model, and their adapters if it has some: then these alone are trained."""

    stages: list[TreeGPTModel]
    weights: ShardMap
    adapters: Adapters | None

    @property
    def trained(self) -> ShardMap:
        return self.weights if self.adapters is None else self.adapters.shards


def build_model(config: Config, model_config: ModelConfig, hf_config: Any, layout: Layout, runtime: Runtime) -> Shards:
    """This rank's stages of the model of `model_config`, with the weights of its checkpoint."""
    megatron_config = transformer_config(hf_config, config)
    attention = runtime.packed_attention(megatron_config.params_dtype, config.policy.attention)
    with init_empty_weights(include_buffers=False):
        twin = AutoModelForCausalLM.from_config(hf_config)
    transformer_engine = config.policy.megatron.spec == "te"
    vocabulary, count = hf_config.vocab_size, config.policy.megatron.virtual_stages
    # An adapted head is a weight of its own in engines and exports. Here, where it does not change, nothing is copied.
    tied, lora = bool(hf_config.tie_word_embeddings) and not adapts_head(model_config.lora), model_config.lora
    stages = []
    for stage in range(count):
        virtual_stage = stage if count > 1 else None
        model = TreeGPTModel(
            megatron_config,
            decoder_spec(megatron_config, attention, virtual_stage, transformer_engine=transformer_engine),
            vocab_size=-(-vocabulary // layout.tensor_size) * layout.tensor_size,
            max_sequence_length=hf_config.max_position_embeddings,
            pre_process=layout.first_stage and stage == 0,
            post_process=layout.last_stage and stage == count - 1,
            share_embeddings_and_output_weights=tied,
            position_embedding_type="none",
            vp_stage=virtual_stage,
        )
        if hf_config.tie_word_embeddings and not tied and model.pre_process and model.post_process:
            model.output_layer.weight = model.embedding.word_embeddings.weight
        model.rotary = twin.model.rotary_emb.to(runtime.device)
        model.layout, model.real_vocab_size = layout, vocabulary
        stages.append(model.to(runtime.device))
    entries = model_entries(hf_config, tied=tied)
    weights = _load(model_config.path, stages, entries, hf_config, layout, tied=tied)
    if lora is None:
        return Shards(stages, weights, None)
    return Shards(stages, weights, add_adapters(stages, twin, entries, lora, config.run.seed, weights))


def _load(
    path: str, stages: list[TreeGPTModel], entries: list[Entry], hf_config: Any, layout: Layout, *, tied: bool
) -> ShardMap:
    """Every rank reads its own parts. What fails on one fails on all, so that none waits for it."""
    problem, reader = "", None
    try:
        reader = CheckpointReader(path, tied=bool(hf_config.tie_word_embeddings))
    except Exception as error:  # files of the wrong form fail in many ways
        problem = f"{type(error).__name__}: {error}"
    _raise_together(path, problem)
    assert reader is not None
    weights = None
    try:
        parameters = named_over_model(stages, layout, lambda stage: stage.named_parameters(remove_duplicate=False))
        groups = hf_config.num_key_value_heads // layout.tensor_size
        weights = ShardMap(parameters, entries, reader.shape, layout, groups, tied=tied)
    except ValueError as error:  # on every rank: the tables and the files are the same everywhere
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
    if found := [each for each in gather_objects(problem) if each]:
        raise UserError(
            f"the weights at model.path {path!r} do not load ({found[0]}): copy the model again, or name another"
        )
