"""A run's newest checkpoint at the Hugging Face Hub, with all that resuming takes (`run.hub`, `--resume`).

    run directory -> backup of the store, its newest checkpoint, manifest -> one commit -> fetch, check

The manifest has the SHA-256 of each file and comes in the same commit, so what is there is complete; a push
that was cut shows nothing, and a file that differs is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from importlib.util import find_spec
from pathlib import Path

import orjson

from insitu.config import Config
from insitu.errors import ConfigError, InsituError, RecordError
from insitu.install_hints import install_extra
from insitu.storage.files import sha256_of, write_text
from insitu.storage.run_dir import TOKENIZER, has_rollouts, read_store
from insitu.storage.temp_dirs import part_folder
from insitu_train.hub_download import download
from insitu_train.hub_upload import HUB, upload
from insitu_train.redaction import Redaction

log = logging.getLogger(__name__)

MANIFEST = "insitu-run.json"
LOOK_S = 10.0
"""Seconds between two looks for a new checkpoint."""
LAST_PUSH_S = 1800.0
"""Longest push at the end of a run."""


def repo_of(where: str) -> str:
    """Return ORG/NAME of hub:ORG/NAME; raise ConfigError."""
    found = HUB.fullmatch(where)
    if found is None:
        raise ConfigError(f"--resume takes a run directory or hub:ORG/NAME, got {where}")
    return found[1]


def check_hub(config: Config) -> None:
    """Raise ConfigError when `run.hub` cannot be used: no package, no token."""
    if not config.run.hub:
        return
    if find_spec("huggingface_hub") is None:
        raise ConfigError(f"run.hub: huggingface_hub is not installed: {install_extra('hub')}")
    from huggingface_hub import get_token

    if get_token() is None:
        raise ConfigError("run.hub: no token of the Hub: set HF_TOKEN, or log in with `hf auth login`")


@asynccontextmanager
async def pushing_checkpoints(config: Config, say: Callable[[str], None]) -> AsyncIterator[None]:
    """Push the newest checkpoint in the background and the last one at the end; `say` gets failures."""
    if not config.run.hub:
        yield
        return
    run, repo, pushed, failed = Path(config.run.dir), config.run.hub, 0, ""

    async def push_newest() -> None:
        nonlocal pushed, failed
        try:
            step = await asyncio.to_thread(_newest, run)
            if step > pushed:
                pushed = await push_run(run, repo)
                failed = ""
        except InsituError as error:
            if str(error) != failed:
                say(f"checkpoint not pushed: {error}")
            failed = str(error)

    ended = asyncio.Event()

    async def follow() -> None:
        while not ended.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await ended.wait()
            await push_newest()

    following = asyncio.create_task(follow())
    try:
        yield
        ended.set()
        done, _ = await asyncio.wait({following}, timeout=LAST_PUSH_S)
        if not done:
            say(f"the last checkpoint was not pushed within {LAST_PUSH_S:g} s")
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


def _newest(run: Path) -> int:
    """Return the newest committed step; 0 before the first."""
    if not (run / "run.sqlite").exists() or not has_rollouts(run):
        return 0
    with closing(read_store(run)) as store:
        last = store.last_step()
    return 0 if last is None else last.step


async def push_run(run: Path, repo: str) -> int:
    """Push the newest checkpoint and return its step. Raises SetupError, RecordError."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(part_folder(run / "hub"))
        step = await asyncio.to_thread(_snapshot, run, folder)
        # Not public, also where the repository exists and is: `upload` refuses then.
        await upload(folder, repo, "model", Redaction(), f"Checkpoint of step {step}", mirror=True)
    log.info("pushed checkpoint step=%d repo=%s", step, repo)
    return step


def _snapshot(run: Path, folder: Path) -> int:
    """Write what resuming takes: the store, then the checkpoint that it names, as links."""
    try:
        with (
            closing(sqlite3.connect(f"file:{run / 'run.sqlite'}?mode=ro", uri=True)) as source,
            closing(sqlite3.connect(folder / "run.sqlite")) as target,
        ):
            source.backup(target)
        with closing(read_store(folder)) as store:
            last = store.last_step()
        if last is None or not last.checkpoint:
            raise RecordError("no step is committed")
        # Links: a checkpoint may be pruned while it is uploaded.
        shutil.copytree(run / last.checkpoint, folder / last.checkpoint, copy_function=os.link)
        for name in ("config.toml", "metrics.jsonl"):
            shutil.copy(run / name, folder / name)
        if (run / TOKENIZER).is_dir():
            shutil.copytree(run / TOKENIZER, folder / TOKENIZER)
    except (OSError, sqlite3.Error) as error:
        raise RecordError(f"cannot copy {run}: {error}") from error
    files = {name: sha256_of(folder / name) for name in _names(folder)}
    write_text(folder / MANIFEST, orjson.dumps({"step": last.step, "files": files}).decode())
    return last.step


def _names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def fetch_run(where: str, run: Path) -> bool:
    """Download the newest checkpoint as run directory `run`; return whether there was one.

    Raises ConfigError when `run` exists, RecordError for an incomplete or changed file, SetupError.
    """
    repo = repo_of(where)
    if run.exists():
        raise ConfigError(f"{run} exists: `--resume {run}` resumes it; remove it to resume {where}")
    run.parent.mkdir(parents=True, exist_ok=True)
    with part_folder(run) as part:
        if download(repo, where, local_dir=part, ignore_patterns=[".gitattributes"]) is None:
            return False
        shutil.rmtree(part / ".cache", ignore_errors=True)
        if not (part / MANIFEST).exists():
            if _names(part):
                raise RecordError(f"{where} holds no run: it has no {MANIFEST}")
            return False
        _verify(part, where)
        part.rename(run)
    return True


def _verify(folder: Path, where: str) -> None:
    try:
        files = orjson.loads((folder / MANIFEST).read_bytes())["files"]
        wrong = [name for name, wanted in files.items() if sha256_of(folder / name) != wanted]
    except (OSError, orjson.JSONDecodeError, KeyError, AttributeError) as error:
        raise RecordError(f"{where} is incomplete: {error}") from error
    if wrong:
        raise RecordError(f"{where}: {wrong[0]} is not the file that was pushed")
