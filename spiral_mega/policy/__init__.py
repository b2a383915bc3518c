"""The trained model behind one protocol (policy.py), sharded by FSDP2 (fsdp/)."""

from spiral_mega.config import Config
from spiral_mega.policy.policy import Policy
from spiral_mega.runtime import Runtime

__all__ = ["Policy", "build_policy"]


def build_policy(config: Config, runtime: Runtime) -> Policy:
    """The policy that `policy.backend` names."""
    from spiral_mega.policy.fsdp.policy import FsdpPolicy

    return FsdpPolicy(config, runtime)
