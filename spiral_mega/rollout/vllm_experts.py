"""Packs the weights of mixture-of-experts layers whenever vLLM loads them.

vLLM 0.32 converts a layer's expert weights to the format that they are computed in at the first
load only (UnquantizedFusedMoEMethod._setup_kernel). Its CPU experts pack and pad weights there, so
after `reload_weights` they would read unpacked weights as packed ones, or reject them. Other
experts convert nothing there.
"""

from __future__ import annotations

from functools import wraps
from typing import Any


def pack_experts_on_every_load() -> None:
    """Patch vLLM, once a process."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )

    set_up = UnquantizedFusedMoEMethod._setup_kernel
    if hasattr(set_up, "__wrapped__"):
        return

    @wraps(set_up)
    def set_up_and_pack(self: Any, layer: Any, w13: Any, w2: Any) -> None:
        is_reload = self.moe_kernel is not None
        set_up(self, layer, w13, w2)
        if is_reload:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    UnquantizedFusedMoEMethod._setup_kernel = set_up_and_pack
