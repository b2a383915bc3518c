"""Where in a checkpoint each policy of a run is: at `policy`, or of two models at `policy_search` and the like."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spiral_mega.policy import Policy


def key_of(model: str) -> str:
    """The key of the model of that name."""
    return f"policy_{model}" if model else "policy"


def policy_states(policies: Mapping[str, Policy]) -> dict[str, Any]:
    """The policies' states for a checkpoint."""
    return {key_of(model): policy.state_dict() for model, policy in policies.items()}


def load_policies(policies: Mapping[str, Policy], state: dict[str, Any]) -> None:
    """Give each policy what `policy_states` said of it."""
    for model, policy in policies.items():
        policy.load_state_dict(state[key_of(model)])
