"""Pairs of `insitu export --to dpo` for DPOTrainer, whose own preparation only takes text."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from insitu.errors import ConfigError, RecordError, SetupError, boundary
from insitu.install_hints import install_package
from insitu_bridges.versions import Need, check

log = logging.getLogger(__name__)

_COLLATOR = Need(("trl.trainer.dpo_trainer:DataCollatorForPreference",), ("pad_token_id",))
_NEEDS = (Need(("trl:DPOTrainer",), ("train_dataset", "data_collator")), _COLLATOR)
_TEXT = ("prompt", "chosen", "rejected")
"""TRL encodes these columns of every dataset; they are empty, and the collator does not read the result."""


def preferences(export: Path | str, *, max_length: int = 0) -> dict[str, Any]:
    """Return `train_dataset` and `data_collator` of DPOTrainer for the pairs of an export, or of one file.

    Ids are those of the file and the loss is over sampled tokens only. max_length: pairs with a longer side
    are left out, named in the log; 0 = none. Raises RecordError, ConfigError and SetupError.
    """
    pairs = _read(Path(export))
    kept = [pair for pair in pairs if not max_length or _longest(pair) <= max_length]
    if len(kept) < len(pairs):
        log.warning(
            "%d of %d pairs are longer than %d tokens", len(pairs) - len(kept), len(pairs), max_length
        )
    if not kept:
        raise RecordError(f"{export} has no pairs" + f" of at most {max_length} tokens" * bool(pairs))
    if not check("trl", *_NEEDS):
        raise SetupError(f"trl is not installed: {install_package('trl')}")
    from datasets import Dataset  # TRL needs it

    rows = [{**dict.fromkeys(_TEXT, ""), "pair": pair} for pair in kept]
    collate = _Collator(_COLLATOR.get()(pad_token_id=0))  # padding is outside both masks
    return {"train_dataset": Dataset.from_list(rows), "data_collator": collate}


def _read(path: Path) -> list[dict[str, Any]]:
    files = sorted((path / "data").glob("*.jsonl")) if path.is_dir() else [path]
    with boundary(RecordError, f"read {path}"):
        rows = [orjson.loads(line) for file in files for line in file.read_bytes().splitlines()]
    if any(not isinstance(row, dict) or "chosen_mask" not in row for row in rows):
        raise RecordError(f"{path} holds no pairs of insitu export --to dpo")
    return rows


def _longest(pair: Mapping[str, Any]) -> int:
    return len(pair["prompt_ids"]) + max(len(pair["chosen_ids"]), len(pair["rejected_ids"]))


class _Collator:
    """TRL's collator on the ids of pairs, with `completion_mask` [2 pairs, tokens] of what was sampled."""

    def __init__(self, collate: Callable[[list[dict[str, Any]]], dict[str, Any]]) -> None:
        self._collate = collate

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        if any("pair" not in example for example in examples):
            raise ConfigError("pairs need DPOConfig(remove_unused_columns=False)")
        # The reference model's sums, where TRL computed them before.
        known = [{k: v for k, v in one.items() if k.startswith("ref_")} for one in examples]
        pairs = [example["pair"] for example in examples]
        batch = self._collate([{**pair, **more} for pair, more in zip(pairs, known, strict=True)])
        sides = [(pair["prompt_ids"], pair[f"{side}_mask"]) for side in _TEXT[1:] for pair in pairs]
        for row, (prompt, mask) in zip(batch["completion_mask"], sides, strict=True):
            row[len(prompt) : len(prompt) + len(mask)] = row.new_tensor(mask)
        return batch
