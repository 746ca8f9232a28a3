"""Cost of a query-key pair of a model, in units of one token through its matrices.

Per layer a token costs 2 operations per weight, a pair 4 per head dimension (score and sum); the number of
layers cancels.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from insitu.errors import ConfigError, boundary


def pair_cost(folder: Path) -> float:
    """Return the cost from the model folder's config.json (names as in transformers).

    Raises ConfigError when it cannot be read or lacks the shape of a layer.
    """
    with boundary(ConfigError, f"read the shape of the model in {folder}"):
        raw: Mapping[str, Any] = json.loads((folder / "config.json").read_text())
        shape = raw.get("text_config", raw)
        try:
            hidden, heads = int(shape["hidden_size"]), int(shape["num_attention_heads"])
            across = int(shape.get("moe_intermediate_size") or shape["intermediate_size"])
        except (KeyError, TypeError) as error:
            raise ConfigError(f"{folder}/config.json lacks {error}") from error
    width = heads * int(shape.get("head_dim") or hidden // heads)
    narrow = width * int(shape.get("num_key_value_heads") or heads) // heads
    experts = int(shape.get("num_experts_per_tok") or 1) if shape.get("moe_intermediate_size") else 1
    weights = 2 * hidden * (width + narrow) + 3 * hidden * across * experts
    return 4 * width / (2 * weights)
