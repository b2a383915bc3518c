"""The typed configuration of a run: every key with its unit, meaning and default.

Unknown keys and wrong types are refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from spiral_mega.config.section import Section


class RunConfig(Section):
    """The run as a whole."""

    dir: str = Field(description="Folder of the run: config, metrics, traces, checkpoints, logs.")
    steps: int = Field(
        gt=0,
        description="Batches in the whole run. Each makes batch.minibatches optimizer updates.",
    )
    seed: int = Field(
        default=0, ge=0, lt=2**63, description="Seed of data order, set sampling and responses."
    )
    resume: Literal["auto", "never"] = Field(
        default="auto", description="auto: resume from the newest checkpoint in run.dir, if any."
    )
    hang_minutes: float = Field(
        default=15.0,
        gt=0,
        description="Minutes without progress on some rank after which all ranks write their "
        "stacks to run.dir/logs and exit. Must exceed the longest engine step, "
        "micro-batch, load or save of a checkpoint.",
    )


class LoraConfig(Section):
    """Low-rank adapters; the defaults are those of Tinker, with which the paper trained."""

    rank: int = Field(default=32, gt=0, description="Rank of each adapter.")
    alpha: int = Field(
        default=32, gt=0, description="Scaling: an adapter's output is multiplied by alpha / rank."
    )
    targets: list[str] = Field(
        default=[
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
            "gate_proj",
            "up_proj",
            "down_proj",
            "lm_head",
        ],
        min_length=1,
        description="Names of the linear layers to adapt: attention, MLP and unembedding.",
    )


class ModelConfig(Section):
    """The model that training starts from."""

    path: str = Field(
        description="Folder of a model in Hugging Face format (config, safetensors, tokenizer), or "
        "its hub name."
    )
    tokenizer: str | None = Field(
        default=None, description="Folder of the tokenizer; null: model.path."
    )
    lora: LoraConfig | None = Field(
        default=None, description="Train adapters only; null: train every weight."
    )
    dimensions: dict[str, Any] | None = Field(
        default=None,
        description="Entries of the model's config.json that determine its sizes, model_type among "
        "them. With them `spiral-mega plan` needs no model. A run refuses a model that "
        "differs from them.",
    )


class MegatronConfig(Section):
    """How megatron-core distributes one copy of the model over ranks."""

    spec: Literal["local", "te"] = Field(
        default="local",
        description="Layer modules: megatron-core's own (local) or transformer-engine's (te, GPU).",
    )
    tensor_parallel: int = Field(
        default=1,
        gt=0,
        description="Ranks over which each layer's heads and MLP columns are split.",
    )
    sequence_parallel: bool = Field(
        default=True,
        description="Split activations between the tensor-parallel layers by tokens over the same "
        "ranks, to save memory.",
    )
    pipeline_parallel: int = Field(
        default=1, gt=0, description="Pipeline stages of consecutive layers."
    )
    virtual_stages: int = Field(
        default=1,
        gt=0,
        description="Interleaved stages on each rank: shorter pipeline bubbles, more messages.",
    )
    expert_parallel: int = Field(
        default=1,
        gt=0,
        description="Ranks of a stage over which its experts are distributed, each expert whole.",
    )
    context_parallel: int = Field(
        default=1,
        gt=0,
        description="Ranks over which the tokens of a micro-batch are split. "
        "policy.microbatch_tokens counts all of them together.",
    )


class PolicyConfig(Section):
    """How the model is sharded and computed in training."""

    backend: Literal["fsdp", "megatron"] = Field(
        default="fsdp",
        description="fsdp: PyTorch FSDP2; megatron: megatron-core, laid out by policy.megatron.",
    )
    megatron: MegatronConfig = MegatronConfig()
    param_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="Compute dtype. Master weights, gradient reduction and optimizer state stay "
        "float32.",
    )
    attention: Literal["auto", "tree_torch", "tree_varlen", "tree_flex"] = Field(
        default="auto",
        description="Attention over token trees: torch (CPU), flash-attn's varlen kernels (GPU, "
        "bfloat16) or FlexAttention (GPU); auto: the one that suits device and dtype.",
    )
    activation_checkpointing: bool = Field(
        default=False,
        description="Recompute each layer's activations in the backward pass to save memory.",
    )
    microbatch_tokens: int = Field(
        default=16384,
        gt=0,
        description="Most distinct tokens of a micro-batch on one rank. Tokens that the sequences "
        "of a problem share count once. No sequence may be longer.",
    )
    max_skipped_updates: int = Field(
        default=10,
        ge=0,
        description="Most consecutive updates that may be skipped because the gradient was not "
        "finite; one more ends the run.",
    )


class OptimizerConfig(Section):
    """AdamW and its learning-rate schedule."""

    lr: float = Field(default=2e-5, gt=0, description="Peak learning rate.")
    betas: tuple[float, float] = Field(
        default=(0.9, 0.95), description="Decay rates of the first and the second moment."
    )
    eps: float = Field(default=1e-8, gt=0, description="Added to the denominator of the update.")
    weight_decay: float = Field(default=0.0, ge=0, description="Decoupled weight decay.")
    max_grad_norm: float = Field(
        default=1.0,
        gt=0,
        allow_inf_nan=True,
        description="Clip gradients to this norm; .inf: only measure it.",
    )
    warmup_steps: int = Field(default=0, ge=0, description="Optimizer updates of linear warm-up.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant",
        description="Learning rate after the warm-up; linear and cosine end at 0 with the run.",
    )
    offload: bool = Field(
        default=False, description="Keep Adam's moments in CPU memory between updates."
    )

    @field_validator("betas", mode="before")
    @classmethod
    def _yaml_has_no_tuples(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    @field_validator("betas")
    @classmethod
    def _betas_are_decay_rates(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError(
                f"optimizer.betas is {list(value)}: each is a decay rate, at least 0 and below 1"
            )
        return value


class TwoModelsConfig(Section):
    """Two policies: theta (`model`) writes search traces, phi all others (paper, appendix B)."""

    form: Literal["adapters", "models"] = Field(
        description="adapters: one base model with an adapter for each policy, as model.lora says; "
        "models: two sets of weights."
    )
    aggregation_model: ModelConfig | None = Field(
        default=None,
        description="For models: the model that phi starts from, with theta's tokens; null: "
        "`model`.",
    )
    aggregation_optimizer: OptimizerConfig | None = Field(
        default=None, description="Optimizer of phi; null: `optimizer`."
    )
    frozen: Literal["search", "aggregation"] | None = Field(
        default=None,
        description="The policy that samples and is not trained; null: both are trained.",
    )


class DataSource(Section):
    """One file or dataset of problems."""

    path: str = Field(
        description="A .jsonl or .parquet file, a local dataset folder, or a Hugging Face dataset name."
    )
    split: str = Field(default="train", description="Split of a named dataset; files have none.")
    subset: str | None = Field(
        default=None, description="Configuration of a named dataset (gsm8k has 'main')."
    )
    verifier: str = Field(
        default="math",
        description="Verifier of the answers: math, exact, arithmetic, or package.module:function. "
        "Rows that name a verifier, as the files of `spiral-mega filter` do, keep "
        "theirs.",
    )
    limit: int | None = Field(
        default=None,
        gt=0,
        description="Use only the first `limit` problems; the others are counted in the log.",
    )


class DataConfig(Section):
    """Problems to train on and held-out problems to evaluate."""

    train: list[DataSource] = Field(min_length=1, description="Sources of training problems.")
    eval: list[DataSource] = Field(
        default=[], description="Sources of held-out problems; empty: no evaluation."
    )
    max_prompt_tokens: int = Field(
        default=1024,
        gt=0,
        description="Problems with a longer search prompt are left out and counted in the log.",
    )
    accept_fingerprint: str | None = Field(
        default=None,
        description="Fingerprint of training problems with which a run may resume although its "
        "checkpoint was made with others; the error that refuses them names it. "
        "Sampling then starts from their first epoch.",
    )


class PromptsConfig(Section):
    """Prompt templates; null: the built-in text.

    The fields are {problem}, {traces} and, for each trace, {number} and {trace}.

    Write {{word}} for a literal {word}; other braces are plain text.
    """

    search: str = Field(default="{problem}", description="Template of the search prompt.")
    aggregation: str | None = Field(default=None, description="Template of the aggregation prompt.")
    trace: str | None = Field(default=None, description="Template of one trace in {traces}.")
    unfinished: str | None = Field(
        default=None, description="Template of one trace that was truncated at max_response_tokens."
    )
    system: str | None = Field(default=None, description="System message; null: none.")
    instruction: str | None = Field(
        default=None,
        description="Answer-format instruction added to problems that lack it; null: the "
        "verifier's; '': none.",
    )
    view: Literal["whole", "answer", "tail"] = Field(
        default="whole",
        description="Part of a trace that the aggregator sees: all, the text after the last "
        "</think>, or the last tokens.",
    )
    tail_tokens: int | None = Field(default=None, gt=0, description="Tokens shown with view: tail.")
    chat_template_kwargs: dict[str, Any] = Field(
        default={},
        description="Arguments of the tokenizer's apply_chat_template, such as enable_thinking.",
    )

    @model_validator(mode="after")
    def _tail(self) -> PromptsConfig:
        if (self.view == "tail") != (self.tail_tokens is not None):
            raise ValueError(
                f"prompts.view is {self.view!r} and prompts.tail_tokens is {self.tail_tokens}: "
                "set prompts.tail_tokens exactly when prompts.view is 'tail'"
            )
        return self


class RewardsConfig(Section):
    """The processes that verify answers."""

    time_limit_s: float = Field(
        default=5.0,
        gt=0,
        description="Wall-clock seconds of one verification; past them the reward is 0.",
    )
    workers: int = Field(default=2, gt=0, description="Verifier processes on each rank.")
    max_failure_rate: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Share of a step's verifications that may crash, raise or time out. Above it "
        "the run ends before it trains on their zero rewards.",
    )


class EngineConfig(Section):
    """The inference engine that samples."""

    name: Literal["transformers", "vllm"] = Field(
        default="transformers",
        description="transformers: the whole model on each rank, without another package; vllm: "
        "vLLM.",
    )
    tensor_parallel: int = Field(
        default=1, gt=0, description="For vllm: ranks over which one engine is split."
    )
    kv_cache_mb: int = Field(
        default=1024, gt=0, description="For vllm: MiB of KV cache on each rank."
    )
    max_num_seqs: int = Field(
        default=64, gt=0, description="Most sequences that an engine decodes at a time."
    )
    sleep: bool = Field(
        default=False,
        description="For vllm on GPU: free the device of weights and KV cache while the policy "
        "trains.",
    )
    exchange_steps: int | None = Field(
        default=None,
        gt=0,
        description="Engine steps between exchanges of the ranks, in which aggregation sets are "
        "routed to the engine that has to prefill the fewest tokens; null: "
        "max_response_tokens / 64, at least 8.",
    )


class SamplingConfig(Section):
    """How responses are sampled."""

    temperature: float = Field(
        default=1.0, gt=0, description="Sampling temperature, also of the trainer's log-probs."
    )
    max_response_tokens: int = Field(
        gt=0, description="L_max: most tokens of a response, search and aggregation alike."
    )
    max_context_tokens: int = Field(
        gt=0, description="Most tokens of prompt and response together."
    )
    environment: str | None = Field(
        default=None,
        description="Replies to the model's turns: calculator, or package.module:function (see "
        "spiral_mega/environments); null: traces have one turn.",
    )
    max_turns: int = Field(
        default=8, gt=1, description="Most turns of the model in a trace with an environment."
    )


class SyncConfig(Section):
    """Weight sync from trainer to engine, and how far the two may differ."""

    lora: Literal["merge", "adapter"] = Field(
        default="merge",
        description="What is sent of a model with adapters. merge: all weights, adapters merged; "
        "adapter (vllm): the adapters alone, which the engine applies.",
    )
    bucket_mb: float = Field(
        default=512,
        gt=0,
        description="MiB of weights gathered at a time; a larger tensor is gathered alone.",
    )
    max_logprob_gap: float = Field(
        default=0.5,
        gt=0,
        description="Largest |log-prob of engine - log-prob of policy| on a canary prompt after a "
        "weight sync; above it the run stops. Rounding alone gives 1e-5 in float32 and "
        "up to a few tenths in bfloat16.",
    )
    max_kl: float | None = Field(
        default=None,
        gt=0,
        description="Largest sampler/kl, the mismatch between sampler and trainer; null: no limit.",
    )
    on_max_kl: Literal["warn", "stop"] = Field(
        default="warn", description="What to do after a step above rollout.sync.max_kl."
    )


class RecordConfig(Section):
    """Record the episodes of a run, or train on recorded ones."""

    write: str | None = Field(
        default=None, description="Folder to which every step's episodes are recorded."
    )
    read: str | None = Field(
        default=None,
        description="Folder that rollout.record.write filled: train on its episodes, without an "
        "engine.",
    )


class RolloutConfig(Section):
    """Sampling of episodes."""

    engine: EngineConfig = EngineConfig()
    sampling: SamplingConfig
    sync: SyncConfig = SyncConfig()
    record: RecordConfig = RecordConfig()


class KlConfig(Section):
    """A KL penalty to a frozen reference. What each choice optimizes: algorithm/regularizers.py."""

    coefficient: float = Field(gt=0, description="beta, the weight of the penalty.")
    estimator: Literal["k1", "k2", "k3"] = Field(
        default="k2", description="Estimator of the KL at each token."
    )
    apply: Literal["loss", "reward"] = Field(
        default="loss",
        description="Add it to the loss of each token, or subtract it from the advantages.",
    )
    reference: str | None = Field(
        default=None,
        description="Folder of the reference; null: the model that training starts from.",
    )

    @model_validator(mode="after")
    def _has_a_gradient(self) -> KlConfig:
        if self.apply == "loss" and self.estimator == "k1":
            raise ValueError(
                "algorithm.kl.estimator is k1 and algorithm.kl.apply loss, whose expected gradient "
                "is 0: use k2 or k3, or apply it as a reward"
            )
        return self


ClipLow = Annotated[float, Field(ge=0, description="Ratios are clipped below at 1 - clip_low.")]
ClipHigh = Annotated[float, Field(ge=0, description="Ratios are clipped above at 1 + clip_high.")]


class ImportanceSamplingLoss(Section):
    """The paper's loss: -r A, with r the ratio of policy to sampler at the token and A its advantage."""

    name: Literal["importance_sampling"] = "importance_sampling"


class PpoClipLoss(Section):
    """PPO's clipped surrogate: no gradient where the ratio of a token has left the clip range."""

    name: Literal["ppo_clip"] = "ppo_clip"
    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.2


class GspoLoss(Section):
    """GSPO: as ppo_clip, with one ratio for each sequence, the geometric mean over its tokens."""

    name: Literal["gspo"] = "gspo"
    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.2


class CispoLoss(Section):
    """CISPO: the clipped ratio is a weight without gradient, so every token keeps its gradient."""

    name: Literal["cispo"] = "cispo"
    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.2


class TruncatedImportanceSamplingLoss(Section):
    """As cispo, with the ratio limited from above only."""

    name: Literal["truncated_importance_sampling"] = "truncated_importance_sampling"
    ratio_cap: float = Field(default=2.0, gt=0, description="Largest ratio.")


Loss = Annotated[
    ImportanceSamplingLoss | PpoClipLoss | GspoLoss | CispoLoss | TruncatedImportanceSamplingLoss,
    Field(discriminator="name"),
]
LossReduction = Literal["sum", "token_mean", "sequence_mean"]


class AlgorithmConfig(Section):
    """What is sampled for a problem (the paper's N1, n, K, N2), and how rewards become a loss."""

    objective: str = Field(
        default="spiral", description="Recipe: a file of spiral_mega/algorithm/objectives/."
    )
    options: dict[str, Any] = Field(
        default={}, description="The recipe's own options; see its `Options`."
    )
    search_traces: int = Field(default=8, gt=0, description="N1: search traces of a problem.")
    set_size: int = Field(default=4, gt=0, description="n: search traces in a set.")
    num_sets: int = Field(default=4, gt=0, description="K: sets of a problem.")
    aggregation_traces: int = Field(default=4, gt=0, description="N2: aggregation traces of a set.")
    set_design: Literal["uniform", "ordered", "balanced"] = Field(
        default="uniform",
        description="How the K distinct sets are drawn. uniform: from all sets of n; ordered: from "
        "all sequences of n; balanced: random partitions, so that every trace is in K n / N1 sets.",
    )
    set_order: Literal["ascending", "random"] = Field(
        default="ascending",
        description="Order of a set's traces in its prompt. ascending: sets share leading traces "
        "and their tokens; random: each set in an order of its own. The design 'ordered' draws its "
        "own orders.",
    )
    target_length: int | None = Field(
        default=None,
        gt=0,
        description="L_target of the length gate, in tokens: longer responses get no positive "
        "advantage; null: no gate.",
    )
    component_weights: Literal["paper", "unbiased"] | dict[str, float] = Field(
        default="paper",
        description="Weight of each component's loss. paper: 1; unbiased: 1 / the scale of its "
        "expected gradient; or a number for each component.",
    )
    loss_reduction: LossReduction | dict[str, LossReduction] = Field(
        default="sum",
        description="Denominator of a token's loss, for all components or by component. sum: "
        "problems of the update (the paper's |B|); token_mean: tokens of the component; "
        "sequence_mean: traces of the component times tokens of the trace.",
    )
    loss: Loss = Field(
        default=ImportanceSamplingLoss(),
        description="Loss of a token, by name, with its own limits.",
    )
    max_sequence_ratio: float | None = Field(
        default=None,
        gt=1,
        description="Mask sequences whose mean ratio to the sampler (geometric, over tokens) is "
        "outside [1 / max_sequence_ratio, max_sequence_ratio], and count their tokens; null: none.",
    )
    entropy_bonus: float = Field(
        default=0.0,
        ge=0,
        description="Coefficient of the entropy that is subtracted from each token's loss; 0: "
        "none.",
    )
    kl: KlConfig | None = Field(
        default=None, description="KL penalty to a reference policy; null: none, as in the paper."
    )

    @field_validator("loss", mode="before")
    @classmethod
    def _loss_is_a_section(cls, value: Any) -> Any:
        if isinstance(value, str):
            raise ValueError(
                f"algorithm.loss is {value!r}, but a loss is a section with its own limits: write "
                f"algorithm.loss.name={value}, or loss: {{name: {value}}} in the file"
            )
        return value


class BatchConfig(Section):
    """The problems of a batch, and the updates made from it."""

    problems: int = Field(
        default=256,
        gt=0,
        description="|B|: problems of a batch; with dynamic_sampling, effective ones.",
    )
    minibatches: int = Field(
        default=1,
        gt=0,
        description="Optimizer updates made from one batch, each on an equal share of its "
        "problems.",
    )
    dynamic_sampling: bool = Field(
        default=True,
        description="Sample further prompts until `problems` of them are effective: some trace has "
        "a nonzero advantage.",
    )
    max_resample_rounds: int = Field(
        default=4,
        ge=0,
        description="With dynamic_sampling, sample at most this many times `problems` further "
        "prompts.",
    )
    oversample: float = Field(
        default=1.0,
        ge=1,
        description="Problems kept in flight, relative to those needed at the current share of "
        "effective ones.",
    )
    keep: Literal["first", "fastest"] = Field(
        default="first",
        description="Which prompts fill the batch: the first in sampling order, or those that "
        "finish first. The others are cancelled. fastest does not wait for stragglers, but favours "
        "problems with short traces.",
    )


class CheckpointConfig(Section):
    """When checkpoints are saved and how many are kept."""

    every: int = Field(
        default=50, gt=0, description="Steps between checkpoints; the last step is always saved."
    )
    keep_last: int = Field(default=2, gt=0, description="Newest checkpoints to keep.")
    save_hf: bool = Field(
        default=True, description="Write the final weights in Hugging Face format to run.dir/model."
    )


class EvalConfig(Section):
    """Evaluation during training, and the harnesses of `spiral-mega eval`."""

    every: int | None = Field(
        default=None, gt=0, description="Steps between evaluations; null: start and end only."
    )
    repeats: int = Field(default=1, gt=0, description="Episodes sampled for each held-out problem.")
    harnesses: list[dict[str, Any]] = Field(
        default=[
            {"kind": "pass_at_k"},
            {"kind": "majority"},
            {"kind": "best_of_n"},
            {"kind": "sequential"},
            {"kind": "rsa"},
        ],
        min_length=1,
        description="What `spiral-mega eval` measures: the `kind` of each harness, a file of "
        "spiral_mega/evaluation/harnesses/, and its sizes.",
    )
    chunk: int = Field(
        default=64,
        gt=0,
        description="Problems that `spiral-mega eval` samples between saves of its results.",
    )


class TelemetryConfig(Section):
    """Where metrics and traces go, in addition to run.dir/metrics.jsonl."""

    wandb: str | None = Field(
        default=None,
        description="Weights & Biases project; null: off. WANDB_MODE=offline needs no account.",
    )
    tensorboard: bool = Field(
        default=False, description="Write TensorBoard event files to run.dir/tensorboard."
    )
    traces: bool = Field(
        default=True, description="Save every trace of every step to run.dir/traces."
    )


class Config(Section):
    """The configuration of a run."""

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
        """Return the name of the model that is not trained, of two; None if there is none."""
        return self.two_models.frozen if self.two_models is not None else None
