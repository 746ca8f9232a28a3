"""`insitu push`: a checkpoint as a model, or the rollouts of a run as a data set, to the Hugging Face Hub.

Everything is private unless asked for otherwise. Rollouts that hold what looks like a secret are left out;
the configuration and the card are redacted. One commit holds all files: an interrupted push shows nothing.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import orjson

from insitu.api import blocking
from insitu.errors import ConfigError, RecordError
from insitu.install_hints import install_extra
from insitu.storage.files import write_text
from insitu_bridges.card import model_card
from insitu_bridges.export import RolloutExport, write_export
from insitu_bridges.imports import MANIFEST
from insitu_train.hub_upload import HUB, upload
from insitu_train.redaction import Redaction

NOT_PUSHED = ("trainer", "*.part")
"""Files of a checkpoint that stay: the optimizer's state."""


def push(what: Path | str, to: str, *, public: bool = False, dry_run: bool = False) -> Mapping[str, Any]:
    """Upload a checkpoint as a model, or the rollouts of a run as a data set, to `hub:ORG/NAME`.

    Returns `repo`, `kind`, `private`, `files` {name: bytes}, `left_out` (rollouts that hold what looks like a
    secret) and `url`. Private unless `public`; `dry_run` only returns what would be uploaded. Raises
    InsituError.
    """
    what = Path(what)
    found = HUB.fullmatch(to)
    if found is None:
        raise ConfigError(f"--to takes hub:ORG/NAME, got {to}")
    kind: Literal["model", "dataset"] = "model" if any(what.glob("*.safetensors")) else "dataset"
    if kind == "dataset" and not (what / "config.toml").is_file():
        raise RecordError(f"{what} is neither a run directory nor a checkpoint (*.safetensors)")
    if not dry_run and find_spec("huggingface_hub") is None:
        raise ConfigError(f"huggingface_hub is not installed: {install_extra('hub')}")
    redaction = Redaction()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="insitu-push-"))) / "files"
        prepare = _model if kind == "model" else _dataset
        left_out = prepare(what, folder, redaction)
        files = {
            path.relative_to(folder).as_posix(): path.stat().st_size
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        report = {
            "repo": found[1],
            "kind": kind,
            "private": not public,
            "files": files,
            "left_out": left_out,
            "url": "",
        }
        if not dry_run:
            report["url"] = blocking(lambda: upload(folder, found[1], kind, redaction, public=public))
    return report


def _model(checkpoint: Path, folder: Path, redaction: Redaction) -> list[str]:
    """Link the files of a checkpoint and write its card."""
    shutil.copytree(
        checkpoint.resolve(), folder, copy_function=_link, ignore=shutil.ignore_patterns(*NOT_PUSHED)
    )
    (folder / "README.md").unlink(missing_ok=True)
    write_text(folder / "README.md", redaction.text(model_card(checkpoint.resolve())))
    return []


def _link(source: str, target: str) -> None:
    # Weights of many GiB are neither copied nor changed.
    Path(target).symlink_to(source)


def _dataset(run: Path, folder: Path, redaction: Redaction) -> list[str]:
    """Export the rollouts of a run; return the ids of those left out."""
    write_export(RolloutExport(run=run, to="hf", out=folder))
    left_out = _with_secrets(folder, redaction)
    if left_out:
        shutil.rmtree(folder)
        write_export(RolloutExport(run=run, to="hf", out=folder, without=frozenset(left_out)))
    manifest = orjson.loads((folder / MANIFEST).read_bytes())
    manifest = redaction.value(manifest) | {"files": manifest["files"]}
    write_text(folder / MANIFEST, orjson.dumps(manifest, option=orjson.OPT_INDENT_2).decode())
    return sorted(left_out)


def _with_secrets(folder: Path, redaction: Redaction) -> set[str]:
    """Return the ids of rollouts whose text or tokens hold what looks like a secret."""
    from pyarrow import parquet
    from tokenizers import Tokenizer

    found: set[str] = set()
    for batch in parquet.ParquetFile(folder / "data" / "rollouts.parquet").iter_batches(256):
        for row in batch.drop_columns(["ids", "logprobs", "turns"]).to_pylist():
            if any(redaction.has_secret(text) for text in _texts(row)):
                found.add(row["rollout_id"])
    rows = parquet.ParquetFile(folder / "data" / "rows.parquet")
    file = folder / "tokenizer" / "tokenizer.json"
    if rows.metadata.num_rows and not file.is_file():
        raise RecordError("the run has no tokenizer: its tokens cannot be searched for secrets")
    for batch in rows.iter_batches(64) if rows.metadata.num_rows else ():
        tokenizer = Tokenizer.from_file(str(file))
        for row in batch.to_pylist():
            if redaction.has_secret(tokenizer.decode(row["ids"], skip_special_tokens=False)):
                found.add(row["rollout_id"])
    return found


def _texts(value: Any) -> Iterator[str]:
    """Yield every text in a value; text that is JSON as what it says, since escapes hide a secret."""
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if isinstance(value, str):
        yield value
        if value[:1] in ("{", "["):
            with suppress(orjson.JSONDecodeError):
                yield from _texts(orjson.loads(value))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from (*_texts(key), *_texts(item))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
