"""The configuration of a run: `schema` says what it may hold, `load` reads it, `checks` finds contradictions."""

from spiral_mega.config.schema import (
    AlgorithmConfig,
    BatchConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    DataSource,
    EvalConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    PolicyConfig,
    PromptsConfig,
    RewardsConfig,
    RolloutConfig,
    RunConfig,
    TelemetryConfig,
)

__all__ = [
    "AlgorithmConfig",
    "BatchConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DataSource",
    "EvalConfig",
    "LoraConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PolicyConfig",
    "PromptsConfig",
    "RewardsConfig",
    "RolloutConfig",
    "RunConfig",
    "TelemetryConfig",
]
