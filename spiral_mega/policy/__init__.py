"""The trained model behind one protocol (protocol.py), on FSDP2 (fsdp/) or megatron-core (megatron/)."""

from spiral_mega.config import Config
from spiral_mega.config.model_set import model_configs
from spiral_mega.distributed.runtime import Runtime
from spiral_mega.errors import UserError
from spiral_mega.models.model_config import read_model_config
from spiral_mega.policy.lora import DEFAULT_ADAPTER
from spiral_mega.policy.megatron.limits import check_layout
from spiral_mega.policy.protocol import FrozenPolicy, Policy
from spiral_mega.policy.reference_path import reference_path

__all__ = ["FrozenPolicy", "Policy", "build_policies", "build_policy", "check_policy"]


def check_policy(config: Config, world_size: int) -> None:
    """Raise UserError where the backend does not support this model on so many ranks. Loads no weights."""
    if config.policy.backend == "megatron":
        try:
            import megatron.core  # noqa: F401
        except ImportError as error:
            raise UserError(
                f"policy.backend is 'megatron', which is not installed ({error}): install "
                "spiral_mega[megatron] or set policy.backend=fsdp"
            ) from error
        for path in filter(None, (config.model.path, reference_path(config))):
            check_layout(read_model_config(path), config, world_size)


def build_policies(
    config: Config, runtime: Runtime
) -> tuple[dict[str, Policy], dict[str, FrozenPolicy]]:
    """Build the run's models, by name: those that are trained, and the frozen ones (see config/model_set.py)."""
    two_models, configs = config.two_models, model_configs(config)
    if two_models is None:
        return {
            name: build_policy(model_config, runtime) for name, model_config in configs.items()
        }, {}
    from spiral_mega.policy.fsdp.fsdp_policy import FsdpModel, FsdpPolicy
    from spiral_mega.policy.fsdp.sharded_model import build_model

    shared = None
    if two_models.form == "adapters":
        shared = build_model(
            config.model, config.policy, runtime, config.run.seed, adapters=tuple(configs)
        )
    trained: dict[str, Policy] = {}
    frozen: dict[str, FrozenPolicy] = {}
    for name, model_config in configs.items():
        adapter = DEFAULT_ADAPTER if shared is None else name
        if name == two_models.frozen:
            frozen[name] = FsdpModel(model_config, runtime, shared, adapter).freeze()
        else:
            trained[name] = FsdpPolicy(model_config, runtime, shared, adapter)
    return trained, frozen


def build_policy(config: Config, runtime: Runtime) -> Policy:
    """Build the policy of a run of one model, on the backend that `policy.backend` names."""
    if config.policy.backend == "megatron":
        from spiral_mega.policy.megatron.megatron_policy import MegatronPolicy

        return MegatronPolicy(config, runtime)
    from spiral_mega.policy.fsdp.fsdp_policy import FsdpPolicy

    return FsdpPolicy(config, runtime)
