"""Downloads from the Hugging Face Hub: models by name (`model.path = "hub:ORG/NAME"`), and runs."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from insitu.engines.safetensors_file import check_complete
from insitu.errors import ConfigError, EngineError, SetupError
from insitu.install_hints import install_extra
from insitu_train.redaction import Redaction

MODEL = re.compile(r"hub:([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "LICENSE*", "NOTICE*")
"""What a model folder needs; no weights in other forms."""


def hub_folder(path: str, say: Callable[[str], None]) -> Path:
    """Return the folder of hub:ORG/NAME or hub:ORG/NAME@REVISION, downloaded where the cache has it not.

    A model that is in the cache is never looked up again: without a revision it stays the one that was found
    first. `say` gets a line before a download, and the revision. Raises ConfigError, SetupError.
    """
    found = MODEL.fullmatch(path)
    if found is None:
        raise ConfigError(f"model.path takes hub:ORG/NAME or hub:ORG/NAME@REVISION, got {path}")
    repo, revision = found[1], found[2]
    cached = _cached(repo, revision, path)
    if cached is not None:
        return cached
    say(f"downloading {path}")
    folder = download(repo, path, revision=revision, allow_patterns=[*FILES])
    if folder is None:
        raise ConfigError(f"model.path: the hub has no {path}")
    say(f"{path} is at revision {folder.name}")
    return folder


def _cached(repo: str, revision: str | None, path: str) -> Path | None:
    """Return the folder in the cache if it is whole."""
    folder = download(repo, path, revision=revision, allow_patterns=[*FILES], local_files_only=True)
    if folder is None or not any(folder.glob("*.safetensors")) or not (folder / "tokenizer.json").exists():
        return None
    try:
        check_complete(folder)
    except EngineError:  # an interrupted download, which goes on
        return None
    return folder


def download(repo: str, where: str, **options: Any) -> Path | None:
    """Return the folder of a repository's files; None if there is none, or none in the cache.

    options: those of `huggingface_hub.snapshot_download`. where: what errors name. Raises ConfigError without
    the package, SetupError.
    """
    if find_spec("huggingface_hub") is None:
        raise ConfigError(f"{where}: huggingface_hub is not installed: {install_extra('hub')}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    try:
        return Path(snapshot_download(repo, endpoint=os.environ.get("HF_ENDPOINT"), **options))
    except LocalEntryNotFoundError as error:
        # Also what a hub that cannot be reached raises, and one that answers 404 without its reason.
        cause = error.__cause__
        absent = isinstance(cause, HfHubHTTPError) and cause.response.status_code == 404
        if absent or options.get("local_files_only"):
            return None
        raise SetupError(f"cannot fetch {where}: no hub can be reached: {_first(cause or error)}") from error
    except (RepositoryNotFoundError, EntryNotFoundError, RevisionNotFoundError):
        return None
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise SetupError(f"cannot fetch {where}: {_first(error)}") from error


def _first(error: BaseException) -> str:
    return Redaction().text(str(error).strip().partition("\n")[0] or type(error).__name__)
