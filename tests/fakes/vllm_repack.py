"""Worker extension that packs experts again after a reload, which vLLM 0.32 leaves out on a CPU."""

from __future__ import annotations

from typing import Any


class RepackExperts:
    """Mixed into vLLM's own worker class."""

    def repack_experts(self) -> int:
        """Return the number of layers with experts."""
        worker: Any = self
        layers = [m for m in worker.model_runner.get_model().modules() if hasattr(m, "w13_weight")]
        for layer in layers:
            layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(layer)
        return len(layers)
