"""The configuration of a run: `load_config` reads it, the classes of `schema` say what it may hold."""

from spiral_mega.config.load import ConfigError, dump_config, load_config
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
    "ConfigError",
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
    "dump_config",
    "load_config",
]
