"""The trained model behind one protocol (policy.py), on FSDP2 (fsdp/) or megatron-core (megatron/)."""

from spiral_mega.config import Config
from spiral_mega.errors import UserError
from spiral_mega.policy.model_config import read_model_config
from spiral_mega.policy.policy import Policy
from spiral_mega.runtime import Runtime

__all__ = ["Policy", "build_policy", "check_policy"]


def check_policy(config: Config, world_size: int) -> None:
    """Raise UserError for what the policy's backend cannot do with this model on so many ranks; nothing is loaded."""
    if config.policy.backend == "megatron":
        try:
            from spiral_mega.policy.megatron.config import check_layout
        except ImportError as error:
            raise UserError(
                f"policy.backend is 'megatron', which is not installed ({error}): install spiral_mega[megatron] or set "
                "policy.backend=fsdp"
            ) from error
        check_layout(read_model_config(config.model.path), config, world_size)


def build_policy(config: Config, runtime: Runtime) -> Policy:
    """The policy that `policy.backend` names."""
    if config.policy.backend == "megatron":
        from spiral_mega.policy.megatron.policy import MegatronPolicy

        return MegatronPolicy(config, runtime)
    from spiral_mega.policy.fsdp.policy import FsdpPolicy

    return FsdpPolicy(config, runtime)
