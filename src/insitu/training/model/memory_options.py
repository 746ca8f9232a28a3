"""Memory techniques of a forward and backward pass.

None changes loss or gradients. Cost: checkpoint one more forward; tiled MLP the MLP once more; offload
transfers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOptions:
    """Memory techniques; all off by default."""

    checkpoint: bool = False
    """Keep only the layers' inputs; recompute layers in the backward pass."""
    save_attention: bool = False
    """With checkpoint: keep attention's output too."""
    tile_mlp: int = 0
    """Tokens of an MLP computed at once; 0 = all."""
    offload_activations: bool = False
    """With checkpoint: keep the layers' inputs in host memory."""
    offload_optimizer: bool = False
    """Keep optimizer moments in host memory between updates."""

    def __str__(self) -> str:
        names = [f.name for f in fields(self) if getattr(self, f.name)]
        return " + ".join(names) or "plain"


PLAIN = MemoryOptions()
