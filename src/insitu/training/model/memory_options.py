"""Which memory techniques a forward and backward pass uses. No torch: the predictor chooses them.

Each leaves loss and gradients as they are; what they cost is time (checkpoint: one more forward; tiled MLP:
the MLP once more; offload: the way over the bus).
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOptions:
    """All off is the plain path."""

    checkpoint: bool = False
    """Layers keep their input only and are computed again in the backward pass."""
    save_attention: bool = False
    """With checkpoint: attention's output is kept, so that attention is not computed again."""
    tile_mlp: int = 0
    """Tokens of an MLP that are computed at once; 0 = all."""
    offload_activations: bool = False
    """With checkpoint: the layers' inputs wait in the host's memory."""
    offload_optimizer: bool = False
    """The optimiser's moments stay in the host's memory between updates."""

    def __str__(self) -> str:
        names = [f.name for f in fields(self) if getattr(self, f.name)]
        return " + ".join(names) or "plain"


PLAIN = MemoryOptions()
