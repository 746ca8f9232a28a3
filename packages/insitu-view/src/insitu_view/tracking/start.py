"""Start of followers: beside a run, or for one that ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import orjson

from insitu import registry
from insitu.config import Config
from insitu.errors import ConfigError, SetupError
from insitu.install_hints import install_extra
from insitu.storage.run_dir import check_store, read_config
from insitu_train.channel.child import python_path
from insitu_view.tracking.follow import log_path

PACKAGES = {"wandb": "wandb", "trackio": "trackio", "tensorboard": "tensorboardX"}
"""Built-in tracker -> package that it needs; its extra is called as the tracker."""
_WORDS = 300


def check_trackers(config: Config) -> None:
    """Raise ConfigError when a known tracker cannot be opened in another process; import none."""
    for name in config.track.to:
        if name.startswith(registry.OBJECT):
            raise ConfigError(
                f"track.to: {name.removeprefix(registry.OBJECT)} is a Python object that another process"
                " cannot import: give its path, module:attribute or file.py:attribute"
            )
        module, _, _ = name.rpartition(":")
        if module.endswith(".py") and not Path(module).is_file():
            raise ConfigError(f"track.to: no such file: {module}")
        if (package := PACKAGES.get(name)) and find_spec(package) is None:
            raise ConfigError(f"track.to: {package} is not installed: {install_extra(name)}")


def start_trackers(path: Path, config: Config, say: Callable[[str], None]) -> None:
    """Start a follower for each tracker of a run that has its directory; never wait and never raise.

    `say` gets one line where a follower fails. Followers end with the run.
    """
    loop = asyncio.get_running_loop()

    def report(line: str) -> None:
        with contextlib.suppress(RuntimeError):  # the run has ended
            loop.call_soon_threadsafe(say, line)

    def wait(process: subprocess.Popen[bytes], name: str) -> None:
        if process.wait():
            report(f"{_failure(path, name, process.returncode)}; `insitu track {path}` sends what is missing")

    for name in config.track.to:
        try:
            # A session of its own: Ctrl-C ends the run, and the follower sends what it left.
            process = _spawn(path, name, stdout=subprocess.DEVNULL, start_new_session=True)
        except OSError as error:
            say(f"tracker {name} not started: {error}")
            continue
        threading.Thread(target=wait, args=(process, name), daemon=True).start()


def track(run: Path | str, *, to: Sequence[str] = ()) -> Mapping[str, int]:
    """Send a run's metrics to trackers, and return the number of lines sent to each.

    `to`: names or paths of trackers (default: the run's `track.to`). What was sent earlier is not sent again;
    a run under way is followed to its end. Raises InsituError.
    """
    path = Path(run)
    config = read_config(path)
    check_store(path)
    names = [registry.reference("trackers", name) for name in to] or list(config.track.to)
    if not names:
        raise ConfigError(f"{path} has no track.to: name a tracker, such as --to tensorboard")
    track = config.track.model_copy(update={"to": tuple(names)})
    check_trackers(config.model_copy(update={"track": track}))
    sent = {}
    for name in names:
        with _spawn(path, name, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            try:
                out, problem = process.communicate()
            except BaseException:
                process.kill()
                raise
        if process.returncode:
            raise SetupError(
                problem.decode(errors="replace").strip() or _failure(path, name, process.returncode)
            )
        sent[name] = int(orjson.loads(out)["sent"])
    return sent


def _spawn(path: Path, name: str, **more: object) -> subprocess.Popen[bytes]:
    # -P: a module of the working directory must not shadow an installed one
    command = [sys.executable, "-P", "-m", "insitu_view.tracking.follow", str(path), name]
    streams = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, **more}
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": python_path()}, **streams)  # type: ignore[call-overload,no-any-return]


def _failure(path: Path, name: str, code: int) -> str:
    """Return one line with the exit of a follower and the last line of its log."""
    log = log_path(path, name)
    last = ""
    with contextlib.suppress(OSError):
        last = next(iter(log.read_text(encoding="utf-8", errors="replace").splitlines()[-1:]), "")
    how = f"killed by signal {-code}" if code < 0 else f"exit status {code}"
    return f"tracker {name} ended ({how}): {last[:_WORDS].removeprefix('insitu: ')} ({log})"
