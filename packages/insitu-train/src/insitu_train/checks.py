"""What only a training run needs, checked before it starts."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer

from insitu.config import Config, model_folder
from insitu.config.base import is_url
from insitu.errors import ConfigError, boundary
from insitu.registry import shipped
from insitu.runtime.preflight import check_model, check_weights
from insitu_train.learner.process import require_learner
from insitu_train.trainer.scoring_server import ScoringServer

TRAINED = ("embedded", "vllm", "sglang", "tinker")
"""Kinds of engines that take new weights from the trainer."""


def check_trained(config: Config) -> None:
    """Raise ConfigError for an engine that takes no weights."""
    if config.engine.kind not in TRAINED and config.engine.kind in shipped("engines"):
        raise ConfigError(
            f"engine.kind {config.engine.kind}: a training run samples with {', '.join(TRAINED)}, which take"
            " its weights and give a log-probability for every sampled token, as losses and corrections need"
        )


def check_service(config: Config) -> None:
    """Raise ConfigError for settings that a training service cannot follow."""
    if config.policy.kind != "tinker":
        if config.engine.kind == "tinker":
            raise ConfigError("engine.kind tinker: a training run needs policy.kind = 'tinker' too")
        return
    if config.train.kl != "none":
        raise ConfigError("policy.kind tinker: train.kl needs a reference policy, which the service lacks")
    if config.engine.temperature != 1.0:
        raise ConfigError("policy.kind tinker: the service trains at engine.temperature = 1 only")
    if config.train.ranks != 1:
        raise ConfigError("policy.kind tinker: train.ranks has no effect, the service places the model")
    if config.engine.model.startswith("tinker://"):
        raise ConfigError(f"policy.kind tinker: engine.model {config.engine.model} is not a base model")


def check_learner(config: Config) -> None:
    """Raise ConfigError if a learner lacks packages or weights."""
    require_learner(config)
    check_weights(config)


def check_reference(config: Config) -> None:
    """Raise ConfigError if the folder of a reference policy has no weights, or a server cannot score."""
    named = {"train.reference": config.train.reference}
    named |= {".".join(filter(None, ["tasks", t.name, "reference"])): t.reference for t in config.tasks}
    for key, name in named.items():
        if is_url(name):
            if config.engine.temperature != 1.0:
                raise ConfigError(f"{key}: a server scores at engine.temperature = 1 only")
            ScoringServer(name, key, model_folder(config), config.train.step_timeout_s, attempts=1)
        elif name:
            check_model(Path(name), key)
            _check_vocabulary(Path(name), model_folder(config), key)


def _check_vocabulary(folder: Path, model: Path, key: str) -> None:
    """Raise ConfigError if two folders do not name the same tokens, or `folder` cannot score one of them."""
    if not (folder / "tokenizer.json").exists():
        raise ConfigError(f"{key}: {folder} has no tokenizer.json to compare with that of model.path")
    theirs, ours = (Tokenizer.from_file(str(one / "tokenizer.json")).get_vocab() for one in (folder, model))
    if theirs != ours:
        raise ConfigError(f"{key}: {folder} has another vocabulary than model.path")
    with boundary(ConfigError, f"{key}: {folder}"):
        # a tokenizer may name tokens for which no model of its family has a row, e.g. Gemma 3's image token
        rows, needed = _rows(folder), min(1 + max(ours.values()), _rows(model))
    if rows < needed:
        raise ConfigError(f"{key}: {folder} has {rows:,} rows for {needed:,} tokens (vocab_size)")


def _rows(folder: Path) -> int:
    """Return the rows of a model's embedding by its config.json."""
    described = json.loads((folder / "config.json").read_bytes())
    return int(described.get("text_config", described)["vocab_size"])
