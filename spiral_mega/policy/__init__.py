"""The trained model behind one protocol (policy.py), on FSDP2 (fsdp/) or megatron-core (megatron/)."""

from spiral_mega.config import Config
from spiral_mega.config.model_set import model_configs
from spiral_mega.distributed.runtime import Runtime
from spiral_mega.errors import UserError
from spiral_mega.models.model_config import read_model_config
from spiral_mega.policy.kl_reference import reference_path
from spiral_mega.policy.lora import ADAPTER
from spiral_mega.policy.megatron.limits import check_layout
from spiral_mega.policy.protocol import FrozenPolicy, Policy

__all__ = ["FrozenPolicy", "Policy", "build_policies", "build_policy", "check_policy"]


def check_policy(config: Config, world_size: int) -> None:
    """Raise UserError for what the policy's backend cannot do with this model on so many ranks; nothing is loaded."""
    if config.policy.backend == "megatron":
        try:
            import megatron.core  # noqa: F401
        except ImportError as error:
            raise UserError(
                f"policy.backend is 'megatron', which is not installed ({error}): install spiral_mega[megatron] or set "
                "policy.backend=fsdp"
            ) from error
        for path in filter(None, (config.model.path, reference_path(config))):
            check_layout(read_model_config(path), config, world_size)


def build_policies(config: Config, runtime: Runtime) -> tuple[dict[str, Policy], dict[str, FrozenPolicy]]:
    """By name, the run's models that are trained, and the others (see config/models.py)."""
    two, configs = config.two_models, model_configs(config)
    if two is None:
        return {name: build_policy(each, runtime) for name, each in configs.items()}, {}
    from spiral_mega.policy.fsdp.fsdp_policy import FsdpModel, FsdpPolicy
    from spiral_mega.policy.fsdp.sharded_model import build_model

    base = None
    if two.form == "adapters":
        base = build_model(config.model, config.policy, runtime, config.run.seed, adapters=tuple(configs))
    trained: dict[str, Policy] = {}
    frozen: dict[str, FrozenPolicy] = {}
    for name, each in configs.items():
        adapter = ADAPTER if base is None else name
        if name == two.frozen:
            frozen[name] = FsdpModel(each, runtime, base, adapter).freeze()
        else:
            trained[name] = FsdpPolicy(each, runtime, base, adapter)
    return trained, frozen


def build_policy(config: Config, runtime: Runtime) -> Policy:
    """The policy of a run of one model, on what `policy.backend` names."""
    if config.policy.backend == "megatron":
        from spiral_mega.policy.megatron.megatron_policy import MegatronPolicy

        return MegatronPolicy(config, runtime)
    from spiral_mega.policy.fsdp.fsdp_policy import FsdpPolicy

    return FsdpPolicy(config, runtime)
