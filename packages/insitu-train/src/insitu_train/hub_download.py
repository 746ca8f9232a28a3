"""Downloads from the Hugging Face Hub: models and data sets by name (hub:ORG/NAME), and runs."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from insitu.engines.safetensors_file import check_complete
from insitu.errors import ConfigError, EngineError, SetupError
from insitu.install_hints import install_extra
from insitu_train.redaction import Redaction

MODEL = re.compile(r"hub:([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
DATA_SET = re.compile(r"hub:([\w.-]+/[\w.-]+)(?:@([\w./-]+))?(?::([^:]+))?")
ROWS = ("*.parquet", "*.jsonl", "*.jsonl.gz")
_ROWS, _SHARD = re.compile(r"\.(?:parquet|jsonl(?:\.gz)?)$"), re.compile(r"-\d+-of-\d+(?=\.\w+(?:\.gz)?$)")
"""The end of a name of rows, and in what files of one part of a set differ: train-00000-of-00002.parquet."""
_FILES = re.compile(r"(?!/)(?:(?!\.\.?/)[^*?\[/]+/)*(?!\.\.?$)(?!.*\*\*)[^/]+")
"""A file, or a pattern of files of one folder."""
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


def hub_rows(path: str, say: Callable[[str], None]) -> str:
    """Return the files of a data set's rows as a path or pattern, downloaded where the cache has them not.

    path: hub:ORG/NAME[@REVISION][:FILES], FILES a file or pattern of the repository. It may be left out where
    all Parquet or JSON Lines files are one part of the set; only then the hub is asked what it has. Raises
    ConfigError, SetupError.
    """
    found = DATA_SET.fullmatch(path)
    if found is None:
        raise ConfigError(f"tasks.path takes hub:ORG/NAME[@REVISION][:FILES], got {path}")
    if found[3] and not _FILES.fullmatch(found[3]):
        raise ConfigError(f"tasks.path: {path}: FILES is a file, or a pattern of files of one folder")
    repo, files = found[1], found[3] or _only_part(path, _listed(found[1], path, found[2]))
    options: dict[str, Any] = {"repo_type": "dataset", "revision": found[2], "allow_patterns": [files]}
    folder = download(repo, path, local_files_only=True, **options)
    if folder is None or not any(folder.glob(files)):
        say(f"downloading {path}")
        folder = download(repo, path, **options)
        if folder is None or not any(folder.glob(files)):
            raise ConfigError(f"tasks.path: the hub has no {path}")
        say(f"{path} is at revision {folder.name}")
    return str(folder / files)


def _listed(repo: str, path: str, revision: str | None) -> Sequence[str]:
    """Return the files of a data set's repository; without a hub of the cache, if it has all rows."""
    options: dict[str, Any] = {"repo_type": "dataset", "revision": revision}
    endpoint = os.environ.get("HF_ENDPOINT")
    try:
        info = _asked(path, lambda hub: hub.HfApi(endpoint=endpoint).repo_info(repo, **options))
    except SetupError:
        held = download(repo, path, local_files_only=True, allow_patterns=[*ROWS], **options)
        if held is None:
            raise
        return [str(one.relative_to(held)) for one in held.rglob("*")]
    if info is None:
        raise ConfigError(f"tasks.path: the hub has no {path}")
    return [one.rfilename for one in info.siblings or ()]


def _only_part(path: str, names: Sequence[str]) -> str:
    """Return the pattern of the only part of a data set among files of its repository; raise ConfigError."""
    parts = sorted({_SHARD.sub("-*-of-*", name) for name in names if _ROWS.search(name)})
    if not parts:
        raise ConfigError(
            f"tasks.path: {path} has no Parquet or JSON Lines file; name others as {path}:FILES"
        )
    if len(parts) > 1:
        named = ", ".join(f":{one}" for one in parts[:8])
        raise ConfigError(f"tasks.path: {path} has several parts; add one of {named}")
    return parts[0]


def download(repo: str, where: str, **options: Any) -> Path | None:
    """Return the folder of a repository's files; None if there is none, or none in the cache.

    options: those of `huggingface_hub.snapshot_download`. where: what errors name. Raises ConfigError without
    the package, SetupError.
    """
    endpoint = os.environ.get("HF_ENDPOINT")
    found = _asked(
        where,
        lambda hub: hub.snapshot_download(repo, endpoint=endpoint, **options),
        local=options.get("local_files_only", False),
    )
    return None if found is None else Path(found)


def _asked(where: str, ask: Callable[[Any], Any], *, local: bool = False) -> Any:
    """Return what the package huggingface_hub answers; None for what the hub, or the cache, has not."""
    if find_spec("huggingface_hub") is None:
        raise ConfigError(f"{where}: huggingface_hub is not installed: {install_extra('hub')}")
    import huggingface_hub
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    # Of the HTTP library that its version uses; a connection that fails is one of these too.
    http: Any = next(base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")
    try:
        return ask(huggingface_hub)
    except LocalEntryNotFoundError as error:
        # Also what a hub that cannot be reached raises, and one that answers 404 without its reason.
        cause = error.__cause__
        absent = isinstance(cause, HfHubHTTPError) and cause.response.status_code == 404
        if absent or local:
            return None
        raise SetupError(f"cannot fetch {where}: no hub can be reached: {_first(cause or error)}") from error
    except (RepositoryNotFoundError, EntryNotFoundError, RevisionNotFoundError):
        return None
    except (http, OSError, ValueError) as error:
        raise SetupError(f"cannot fetch {where}: {_first(error)}") from error


def _first(error: BaseException) -> str:
    return Redaction().text(str(error).strip().partition("\n")[0] or type(error).__name__)
