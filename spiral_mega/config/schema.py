"""The typed configuration of a run: every key, its unit and its default. Unknown keys and wrong types are refused."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from spiral_mega.config.harnesses import BestOfN, Harness, Majority, PassAtK, Rsa, Sequential
from spiral_mega.config.section import Section


class RunConfig(Section):
    dir: str = Field(description="Folder of the run: config, metrics, traces, checkpoints, plots.")
    steps: int = Field(gt=0, description="Optimizer steps in the whole run.")
    seed: int = Field(default=0, ge=0, lt=2**63)
    resume: Literal["auto", "never"] = Field(
        default="auto", description="auto: go on from the newest checkpoint in run.dir, if there is one."
    )
    hang_minutes: float = Field(
        default=15.0,
        gt=0,
        description="When training has not moved for so long on some rank, all write their stacks to run.dir/logs and "
        "end. Longer than the longest of: one engine step, one micro-batch, loading or ending a checkpoint.",
    )


class LoraConfig(Section):
    """Low-rank adapters; the defaults are those of Tinker, which the paper trained with."""

    rank: int = Field(default=32, gt=0)
    alpha: int = Field(default=32, gt=0)
    targets: list[str] = Field(
        default=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"],
        min_length=1,
        description="Names of the linear layers to adapt: attention, MLP and unembedding.",
    )


class ModelConfig(Section):
    path: str = Field(
        description="Folder of a model in Hugging Face form (config, safetensors, tokenizer), or hub name."
    )
    tokenizer: str | None = Field(default=None, description="Folder of the tokenizer, when it is not model.path.")
    lora: LoraConfig | None = Field(default=None, description="null trains every weight.")
    dimensions: dict[str, Any] | None = Field(
        default=None,
        description="Entries of the model's config.json that decide its sizes (model_type among them): `plan` then "
        "needs no model. A run refuses a model that differs from them.",
    )


class MegatronConfig(Section):
    """How megatron-core spreads one copy of the model over tensor, context and pipeline parallel ranks."""

    spec: Literal["local", "te"] = Field(
        default="local", description="Whose modules the layers are: megatron-core's own, or transformer-engine's (GPU)."
    )
    tensor_parallel: int = Field(default=1, gt=0, description="Ranks that share every layer's heads and MLP columns.")
    sequence_parallel: bool = Field(
        default=True, description="Those ranks also share the rows between the layers' products: less memory."
    )
    pipeline_parallel: int = Field(default=1, gt=0, description="Stages of consecutive layers.")
    virtual_stages: int = Field(
        default=1,
        gt=0,
        description="Stages of each rank, in turns with the others': less waiting, more messages.",
    )
    expert_parallel: int = Field(default=1, gt=0, description="Ranks of a stage that share its experts, each whole.")
    context_parallel: int = Field(
        default=1,
        gt=0,
        description="Ranks that share a micro-batch's rows from end to end; policy.microbatch_tokens is for all.",
    )


class PolicyConfig(Section):
    backend: Literal["fsdp", "megatron"] = Field(
        default="fsdp", description="What shards the model; megatron: megatron-core, as `megatron` says."
    )
    megatron: MegatronConfig = MegatronConfig()
    param_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Compute type; master weights, gradients' reduction and optimizer stay float32."
    )
    attention: Literal["auto", "tree_torch", "tree_varlen", "tree_flex"] = Field(
        default="auto",
        description="Attention over token trees by torch (CPU), flash-attn's varlen kernels (GPU, bfloat16) or "
        "FlexAttention (GPU); auto: what suits device and compute type.",
    )
    activation_checkpointing: bool = False
    microbatch_tokens: int = Field(
        default=16384,
        gt=0,
        description="Distinct tokens in one micro-batch on one rank; what a draw's sequences share counts once, and "
        "no sequence may be longer.",
    )
    max_skipped_updates: int = Field(
        default=10,
        ge=0,
        description="Updates skipped in a row because the gradient was not finite; one more ends the run.",
    )


class OptimizerConfig(Section):
    lr: float = Field(default=2e-5, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(
        default=1.0, gt=0, allow_inf_nan=True, description="Norm to clip gradients to; .inf only measures it."
    )
    warmup_steps: int = Field(default=0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    offload: bool = Field(default=False, description="Keep Adam's moments in CPU memory between optimizer steps.")

    @field_validator("betas", mode="before")
    @classmethod
    def _yaml_has_no_tuples(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    @field_validator("betas")
    @classmethod
    def _betas_are_decay_rates(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError(f"optimizer.betas is {list(value)}: each is a decay rate, at least 0 and below 1")
        return value


class TwoModelsConfig(Section):
    """Search traces by one policy, theta, all others by another, phi (paper, appendix B). Theta is `model`."""

    form: Literal["adapters", "models"] = Field(
        description="adapters: model.path with an adapter each, as model.lora says; models: weights of their own."
    )
    aggregation_model: ModelConfig | None = Field(
        default=None, description="models: what phi is, with theta's tokens; null: it starts as theta does."
    )
    aggregation_optimizer: OptimizerConfig | None = Field(default=None, description="phi's; null: as `optimizer`.")
    frozen: Literal["search", "aggregation"] | None = Field(
        default=None, description="The one that samples and is not trained; null: both are trained."
    )


class DataSource(Section):
    path: str = Field(
        description="A .jsonl or .parquet file, a local dataset folder, or the name of a Hugging Face dataset."
    )
    split: str = Field(default="train", description="Split, for a dataset by name; files have none.")
    subset: str | None = Field(default=None, description="Configuration of a dataset by name (gsm8k has 'main').")
    verifier: str = Field(
        default="math",
        description="VerifierPool of its answers: math, exact, arithmetic, or package.module:function. Rows that name "
        "their own (as the files of `spiral-mega filter` do) keep it.",
    )
    limit: int | None = Field(
        default=None, gt=0, description="Take the first `limit` problems only; the rest are counted."
    )


class DataConfig(Section):
    train: list[DataSource] = Field(min_length=1)
    eval: list[DataSource] = Field(default=[])
    max_prompt_tokens: int = Field(
        default=1024, gt=0, description="Problems whose search prompt is longer are left out, and counted."
    )
    accept_fingerprint: str | None = Field(
        default=None,
        description="Fingerprint of training problems that a run may go on with although its checkpoint was made with "
        "others; the error that refuses them names it. They are then drawn from their beginning.",
    )


class PromptsConfig(Section):
    """Chat templates with {problem}, {traces} and, for one trace, {number}, {trace}. Null: the built-in text.

    Write {{word}} for a literal {word}; other braces are plain text.
    """

    search: str = Field(default="{problem}")
    aggregation: str | None = None
    trace: str | None = None
    unfinished: str | None = None
    system: str | None = None
    instruction: str | None = Field(
        default=None, description="Answer-format instruction added to a problem that does not carry it; '' adds none."
    )
    view: Literal["whole", "answer", "tail"] = Field(
        default="whole", description="What the aggregator sees: all, the text after the last </think>, or the tail."
    )
    tail_tokens: int | None = Field(default=None, gt=0, description="For view: tail.")
    chat_template_kwargs: dict[str, Any] = Field(default={})

    @model_validator(mode="after")
    def _tail(self) -> PromptsConfig:
        if (self.view == "tail") != (self.tail_tokens is not None):
            raise ValueError(
                f"prompts.view is {self.view!r} and prompts.tail_tokens is {self.tail_tokens}: "
                "set prompts.tail_tokens exactly when prompts.view is 'tail'"
            )
        return self


class RewardsConfig(Section):
    time_limit_s: float = Field(default=5.0, gt=0, description="Wall-clock limit of one verification; past it: 0.")
    workers: int = Field(default=2, gt=0, description="VerifierPool processes on each rank.")
    max_failure_rate: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Share of a step's verifications that may crash, raise or time out; past it the run ends, before "
        "it trains on their zeros.",
    )


class EngineConfig(Section):
    """The engine that samples."""

    name: Literal["transformers", "vllm"] = "transformers"
    tensor_parallel: int = Field(default=1, gt=0, description="vllm: ranks that share one engine's model.")
    kv_cache_mb: int = Field(default=1024, gt=0, description="vllm: MiB of KV cache on each rank.")
    max_num_seqs: int = Field(default=64, gt=0, description="Sequences that an engine decodes together.")
    sleep: bool = Field(
        default=False, description="vllm on GPU: weights and KV cache leave the device while the policy trains."
    )
    exchange_steps: int | None = Field(
        default=None,
        gt=0,
        description="Engine steps between two exchanges of the ranks, by which sets go to the engine that reads the "
        "least; null: max_response_tokens / 64, at least 8.",
    )


class SamplingConfig(Section):
    """How responses are sampled."""

    temperature: float = Field(default=1.0, gt=0)
    max_response_tokens: int = Field(gt=0, description="L_max: longest response, search and aggregation alike.")
    max_context_tokens: int = Field(gt=0, description="Longest prompt plus response that the model is run at.")
    environment: str | None = Field(
        default=None,
        description="What answers a trace's turns: calculator, or package.module:function (spiral_mega/environments); "
        "null: traces have one turn.",
    )
    max_turns: int = Field(default=8, gt=1, description="Turns of the model in a trace that has an environment.")


class SyncConfig(Section):
    """Weight sync from trainer to engine, and how far the two may differ."""

    lora: Literal["merge", "adapter"] = Field(
        default="merge",
        description="What a weight sync sends of a model with adapters: whole merged weights, or (vllm) the adapters "
        "alone, which the engine adds as it goes.",
    )
    bucket_mb: float = Field(
        default=512, gt=0, description="MiB of weights gathered at once for the engine; a larger tensor goes alone."
    )
    max_logprob_gap: float = Field(
        default=0.5,
        gt=0,
        description="Largest |log-prob of engine - of policy| on the canary after a weight sync; past "
        "it the run stops. Rounding alone gives 1e-5 in float32 and up to a few tenths in bfloat16.",
    )
    max_kl: float | None = Field(
        default=None, gt=0, description="Bound on sampler/kl, the mismatch between sampler and trainer; null: none."
    )
    on_max_kl: Literal["warn", "stop"] = Field(default="warn", description="What a step past rollout.sync.max_kl does.")


class RecordConfig(Section):
    """Record episodes of a run, or replay recorded ones."""

    write: str | None = Field(default=None, description="Folder to write every step's episodes to, for replay.")
    read: str | None = Field(
        default=None, description="Folder that rollout.record.write wrote: train on its episodes, without an engine."
    )


class RolloutConfig(Section):
    engine: EngineConfig = EngineConfig()
    sampling: SamplingConfig
    sync: SyncConfig = SyncConfig()
    record: RecordConfig = RecordConfig()


class KlConfig(Section):
    """A KL penalty to a frozen reference; what each choice optimises is told in algorithm/regularizers.py."""

    coefficient: float = Field(gt=0, description="beta")
    estimator: Literal["k1", "k2", "k3"] = "k2"
    apply: Literal["loss", "reward"] = "loss"
    reference: str | None = Field(
        default=None, description="Folder of the reference; null: the model that training starts from."
    )

    @model_validator(mode="after")
    def _has_a_gradient(self) -> KlConfig:
        if self.apply == "loss" and self.estimator == "k1":
            raise ValueError(
                "algorithm.kl.estimator is k1 and algorithm.kl.apply loss, whose expected gradient is 0: use k2 or "
                "k3, or apply it as a reward"
            )
        return self


class AlgorithmConfig(Section):
    """The paper's N1, n, K, N2 and how credit becomes a loss."""

    objective: str = Field(default="spiral", description="A file of spiral_mega/algorithm/objectives/.")
    options: dict[str, Any] = Field(default={}, description="What the objective's own `Options` hold.")
    search_traces: int = Field(default=8, gt=0, description="N1")
    set_size: int = Field(default=4, gt=0, description="n")
    num_sets: int = Field(default=4, gt=0, description="K")
    aggregation_traces: int = Field(default=4, gt=0, description="N2, for each set")
    set_design: Literal["uniform", "ordered", "balanced"] = "uniform"
    set_order: Literal["ascending", "random"] = Field(
        default="ascending",
        description="How a set lists its traces: ascending, so that sets share leading traces and their tokens, or "
        "each set at random. The design 'ordered' has orders of its own.",
    )
    target_length: int | None = Field(default=None, gt=0, description="L_target of the length gate; null: no gate.")
    component_weights: Literal["paper", "unbiased"] | dict[str, float] = "paper"
    loss_reduction: (
        Literal["sum", "token_mean", "sequence_mean"] | dict[str, Literal["sum", "token_mean", "sequence_mean"]]
    ) = "sum"
    loss: Literal["importance_sampling", "ppo_clip", "cispo", "gspo", "truncated_importance_sampling"] = (
        "importance_sampling"
    )
    clip_low: float = Field(default=0.2, ge=0, description="Ratios are clipped below at 1 - clip_low.")
    clip_high: float = Field(default=0.2, ge=0, description="Ratios are clipped above at 1 + clip_high.")
    ratio_cap: float = Field(default=2.0, gt=0, description="truncated_importance_sampling: largest weight.")
    entropy_bonus: float = Field(
        default=0.0, ge=0, description="Times the entropy at each trained token, subtracted from its loss."
    )
    kl: KlConfig | None = Field(default=None, description="KL penalty to a reference policy; null: none, as the paper.")
    max_sequence_ratio: float | None = Field(
        default=None,
        gt=1,
        description="Sequences whose mean ratio to the sampler (geometric, over tokens) is outside [1 / it, it] are "
        "left out of the loss, and counted; null: none.",
    )


class BatchConfig(Section):
    problems: int = Field(default=256, gt=0, description="|B|: problems (effective ones) in an optimizer step.")
    minibatches: int = Field(default=1, gt=0, description="Optimizer updates made from one batch.")
    dynamic_sampling: bool = Field(default=True, description="Draw until `problems` of them are effective.")
    max_resample_rounds: int = Field(default=4, ge=0, description="At most so many times `problems` more are drawn.")
    oversample: float = Field(
        default=1.0, ge=1, description="Problems in progress, over what the share of effective ones calls for."
    )
    keep: Literal["first", "fastest"] = Field(
        default="first",
        description="Which draws fill the batch: the first in order, or those that end first. Either way the rest is "
        "given up. The fastest do not wait for stragglers, and lean towards problems whose traces are short.",
    )


class CheckpointConfig(Section):
    every: int = Field(default=50, gt=0, description="Steps between checkpoints; the last step is always saved.")
    keep_last: int = Field(default=2, gt=0)
    save_hf: bool = Field(default=True, description="Write the final weights in Hugging Face form to run.dir/model.")


class EvalConfig(Section):
    every: int | None = Field(default=None, gt=0, description="Steps between evaluations; null: start and end only.")
    repeats: int = Field(default=1, gt=0, description="Episodes sampled for each held-out problem.")
    harnesses: list[Harness] = Field(
        default=[PassAtK(), Majority(), BestOfN(), Sequential(), Rsa()],
        min_length=1,
        description="What `spiral-mega eval` measures.",
    )
    chunk: int = Field(
        default=64, gt=0, description="Problems that `spiral-mega eval` samples before it saves what it has."
    )


class TelemetryConfig(Section):
    wandb: str | None = Field(default=None, description="Project name; null: off. WANDB_MODE=offline needs no account.")
    tensorboard: bool = False
    traces: bool = Field(default=True, description="Save every trace of every step to run.dir/traces.")


class Config(Section):
    run: RunConfig
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig
    two_models: TwoModelsConfig | None = None
    prompts: PromptsConfig = PromptsConfig()
    rewards: RewardsConfig = RewardsConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    policy: PolicyConfig = PolicyConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    batch: BatchConfig = BatchConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    @property
    def frozen(self) -> str | None:
        """Of two models, the name of the one that is not trained."""
        return self.two_models.frozen if self.two_models is not None else None
