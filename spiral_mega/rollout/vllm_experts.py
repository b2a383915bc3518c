"""Experts packed anew whenever vLLM loads weights.

vLLM 0.32 lets a layer's experts bring their weights into the form that they compute with at the first load only
(UnquantizedFusedMoEMethod._setup_kernel). Those on CPU pack and pad them there, so that after `reload_weights` they
would take unpacked weights for packed ones, or not take them at all. Other experts have nothing to do there.
"""

from __future__ import annotations

from functools import wraps
from typing import Any


def pack_experts_on_every_load() -> None:
    """Mend it, once a process."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    set_up = UnquantizedFusedMoEMethod._setup_kernel
    if hasattr(set_up, "__wrapped__"):
        return

    @wraps(set_up)
    def set_up_and_pack(self: Any, layer: Any, w13: Any, w2: Any) -> None:
        again = self.moe_kernel is not None
        set_up(self, layer, w13, w2)
        if again:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    UnquantizedFusedMoEMethod._setup_kernel = set_up_and_pack
