"""docker-compose.yaml of a task folder: the part of it that containers.py can start.

What is not named here is refused by name, so that no task runs with less than its file says. Of the agent's
own service only what the network needs is read: its image and resources come from the task's own file.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from insitu.errors import RecordError, TaskError
from insitu.storage.image_builds import register_build
from insitu.tasks.shared import yaml_mapping
from insitu_tasksets.container_plan import Condition, Health, Mount, SideService

NAMES = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
IGNORED = frozenset(
    "ports expose restart container_name hostname stdin_open tty labels platform pull_policy logging"
    " stop_grace_period stop_signal".split()
)
"""Without effect inside the network, but for names, which become host names."""
SERVICE = frozenset(
    "image build command entrypoint environment user working_dir depends_on healthcheck volumes tmpfs init"
    " read_only shm_size mem_limit cpus deploy networks".split()
)
OWN = frozenset("image build command environment depends_on volumes networks deploy mem_limit cpus".split())
KEEP_ALIVE = frozenset({"sleep infinity", "tail -f /dev/null"})
CONDITIONS: Mapping[str, Condition] = {
    "service_started": "service_started",
    "service_healthy": "service_healthy",
    "service_completed_successfully": "service_completed_successfully",
}
LEAST_DEADLINE_S, MOST_DEADLINE_S = 60.0, 900.0
MOST_SERVICES = 8
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,40}")
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,62}")
_VARIABLE = re.compile(r"\$(?:(\$)|\{([A-Za-z_]\w*)(?:(:?-)([^}$]*))?\}|([A-Za-z_]\w*)|(\{.*))", re.DOTALL)
_UNSAFE = re.compile(r'[\x00-\x1f\x7f,"$]')
"""In paths of volumes: what the command line of docker, or compose, would read as more than a path."""
MOST_MB, MOST_S = 1 << 30, 1e6
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|us|h|m|s)")
_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compose:
    """What a file says."""

    services: tuple[SideService, ...] = ()
    """But for the agent's own, in an order in which they can start."""
    env: dict[str, str] = field(default_factory=dict)
    """Of the agent's own service, as all below."""
    after: dict[str, Condition] = field(default_factory=dict)
    volumes: tuple[str, ...] = ()
    image: str = ""


def compose_file(folder: Path) -> Path | None:
    """Return the compose file of a folder; None without one."""
    return next((folder / name for name in NAMES if (folder / name).is_file()), None)


def read_compose(path: Path, own: str) -> Compose:
    """Read a file in which `own` is the agent's service. Raises TaskError."""
    try:
        return _ComposeReader(path, own).read()
    except (RecordError, ValueError, TypeError, ArithmeticError) as error:
        raise TaskError(f"{path.name}: {error}") from None


def megabytes(value: object, name: str) -> int:
    """Return the size of `8G`, `512 MiB` or a number of bytes; 0 for none. Raises TaskError."""
    found = SIZE.fullmatch(str(value).strip() or "0")
    power = 0 if found is None else ("", "k", "m", "g", "t").index(found[2].lower())
    size = math.inf if found is None else float(found[1]) * 1024.0**power / (1 << 20)
    if size > MOST_MB:
        raise TaskError(f"{name}: {ascii(value)[:60]} is no size like 8G")
    return math.ceil(size)


class _ComposeReader:
    def __init__(self, path: Path, own: str) -> None:
        self._path, self._own = path, own
        file = yaml_mapping(path)
        self._services: dict[str, dict[str, Any]] = {}
        for name, keys in _mapping(file.get("services"), f"{path.name}: services").items():
            self._services[name] = _mapping(keys, f"{path.name}: services.{name}")
        for key in sorted(set(file) - {"services", "volumes", "networks", "version", "name"}):
            if not key.startswith("x-"):
                raise self._refused(key)
        self._declared = _mapping(file.get("volumes"), f"{path.name}: volumes")
        for name, keys in self._declared.items():
            if keys or not _NAME.fullmatch(name):
                raise self._refused(f"volumes.{ascii(name)[1:-1][:60]}")

    def _refused(self, key: str) -> TaskError:
        return TaskError(f"{self._path.name}: {key} is not supported")

    def read(self) -> Compose:
        others = {name: keys for name, keys in self._services.items() if name != self._own}
        if len(others) > MOST_SERVICES:
            raise TaskError(f"{self._path.name}: more than {MOST_SERVICES} services beside the agent's")
        self._check_networks()
        made = {name: self._service(name, keys) for name, keys in others.items()}
        own = self._services.get(self._own, {})
        self._check_keys(self._own, own, OWN)
        command = " ".join(self._words(self._own, own, "command") or ("sleep", "infinity"))
        if re.sub(r"^(/bin/)?(ba|da)?sh -l?c ", "", command) not in KEEP_ALIVE:
            raise self._refused(f"services.{self._own}.command")
        after = self._after(self._own, own)
        for waiting, conditions in ((self._own, after), *((one.name, one.after) for one in made.values())):
            self._check_waits(waiting, conditions, made)
        return Compose(
            services=tuple(self._ordered(made)),
            after=after,
            env=self._env(self._own, own),
            volumes=tuple(self._volumes(self._own, own)[0]),
            image=self._image(self._own, own) if own.get("image") or own.get("build") else "",
        )

    def _check_keys(self, name: str, keys: Mapping[str, Any], known: frozenset[str]) -> None:
        for key in sorted(set(keys) - known - IGNORED):
            raise self._refused(f"services.{name}.{key}")

    def _check_networks(self) -> None:
        """Raise TaskError for services that do not all see each other."""
        sets = {frozenset(_names(keys.get("networks")) or ("default",)) for keys in self._services.values()}
        if len(sets) > 1 or any(len(names) > 1 for names in sets):
            raise self._refused("more than one network")

    def _service(self, name: str, keys: Mapping[str, Any]) -> SideService:
        if not _NAME.fullmatch(name) or name.lower() == self._own:
            raise TaskError(f"{self._path.name}: {ascii(name)[:60]} is no name of a service")
        self._check_keys(name, keys, SERVICE)
        volumes, mounts = self._volumes(name, keys)
        limits = _mapping(_mapping(keys.get("deploy"), "deploy").get("resources"), "resources")
        limits = _mapping(limits.get("limits"), "limits")
        aliases = {str(keys.get(key) or "") for key in ("container_name", "hostname")} - {name}
        for taken in {alias.lower() for alias in aliases} & {self._own, *self._services}:
            raise TaskError(f"{self._path.name}: services.{name}: the host name {taken} is another service's")
        return SideService(
            name=name,
            image=self._image(name, keys),
            names=tuple(sorted(alias for alias in aliases if _HOST.fullmatch(alias))),
            entrypoint=self._words(name, keys, "entrypoint"),
            command=self._words(name, keys, "command"),
            env=self._env(name, keys),
            user=self._text(keys.get("user") or ""),
            workdir=self._text(keys.get("working_dir") or ""),
            after=self._after(name, keys),
            health=self._health(name, keys.get("healthcheck")),
            volumes=tuple(volumes),
            mounts=tuple(mounts),
            tmpfs=tuple(self._text(place) for place in _list(keys.get("tmpfs"))),
            init=self._flag(keys, "init", name),
            read_only=self._flag(keys, "read_only", name),
            shm_mb=megabytes(self._text(keys.get("shm_size") or 0), f"services.{name}.shm_size"),
            memory_mb=megabytes(
                self._text(keys.get("mem_limit") or limits.get("memory") or 0), f"services.{name}.memory"
            ),
            cpus=self._number(keys.get("cpus") or limits.get("cpus") or 0, f"services.{name}.cpus"),
        )

    def _check_waits(
        self, waiting: str, conditions: Mapping[str, Condition], made: Mapping[str, SideService]
    ) -> None:
        where = f"{self._path.name}: services.{waiting}.depends_on"
        for name, condition in conditions.items():
            if name not in made:
                raise TaskError(f"{where}: there is no service {ascii(name)[:60]}")
            if condition == "service_healthy" and made[name].health is None:
                raise TaskError(f"{where}: {name} has no healthcheck")

    def _ordered(self, made: dict[str, SideService]) -> Iterable[SideService]:
        left = dict(made)
        while left:
            free = [name for name, one in left.items() if not set(one.after) & set(left)]
            if not free:
                raise TaskError(f"{self._path.name}: {', '.join(left)} wait for each other")
            for name in free:
                yield left.pop(name)

    def _text(self, value: object) -> str:
        """Return a value with its variables; raise TaskError for one that the host would fill in."""

        def fill(found: re.Match[str]) -> str:
            if found[1]:
                return "$"
            if found[6]:
                raise self._refused(ascii(found[0])[1:-1][:80])
            if found[3] is None:
                name = found[2] or found[5]
                raise TaskError(f"{self._path.name} reads {name} from the host, which sandboxes cannot see")
            return found[4]

        text = _VARIABLE.sub(fill, "" if value is None else _plain(value))
        if "\0" in text:
            raise self._refused(f"{ascii(text)[:80]}: a byte of 0")
        return text

    def _flag(self, keys: Mapping[str, Any], key: str, name: str) -> bool:
        value = keys.get(key)
        if value is not None and not isinstance(value, bool):
            raise TaskError(
                f"{self._path.name}: services.{name}.{key}: {ascii(value)[:40]} is not true or false"
            )
        return bool(value)

    def _number(self, value: object, where: str) -> float:
        """Return a number from 0 to MOST_S; raise TaskError."""
        try:
            number = float(self._text(value))
        except ValueError:
            number = math.nan
        if not 0 <= number <= MOST_S:
            raise TaskError(f"{self._path.name}: {where}: {ascii(value)[:40]} is no number of use")
        return number

    def _words(self, name: str, keys: Mapping[str, Any], key: str) -> tuple[str, ...] | None:
        value = keys.get(key)
        if value is None:
            return None
        try:
            words = shlex.split(value) if isinstance(value, str) else _list(value)
        except ValueError as error:
            raise TaskError(f"{self._path.name}: services.{name}.{key}: {error}") from None
        return tuple(self._text(word) for word in words)

    def _env(self, name: str, keys: Mapping[str, Any]) -> dict[str, str]:
        value = keys.get("environment") or {}
        if isinstance(value, list):
            pairs = [str(item).partition("=") for item in value]
            value = {key: text if is_set else None for key, is_set, text in pairs}
        found: dict[str, str] = {}
        for key, text in _mapping(value, f"services.{name}.environment").items():
            if text is None:
                raise TaskError(f"{self._path.name} reads {key} from the host, which sandboxes cannot see")
            if name == self._own and "${" in _plain(text) and not set("-?+") & set(_plain(text)):
                continue  # a path of the other harness, such as TEST_DIR
            found[key] = self._text(text)
        return found

    def _image(self, name: str, keys: Mapping[str, Any]) -> str:
        build, named = keys.get("build"), keys.get("image")
        if build is None or build == "":
            if named and name == self._own and "${" in str(named):
                return ""
            if not named:
                raise TaskError(f"{self._path.name}: service {name} has neither image nor build")
            return self._text(named)
        table = _mapping({"context": build} if isinstance(build, str) else build, f"services.{name}.build")
        for key in sorted(set(table) - {"context", "dockerfile"}):
            raise self._refused(f"services.{name}.build.{key}")
        context = table.get("context") or "."
        if name == self._own and "${" in str(context):
            context = "."
        file = self._text(table.get("dockerfile") or "Dockerfile")
        folder = self._inside(self._text(context), f"services.{name}.build")
        if name == self._own and file == "Dockerfile" and folder == self._path.parent.resolve():
            return ""  # the usual one
        if not (folder / file).is_file():
            raise TaskError(f"{self._path.name}: services.{name}.build: there is no {file} in {context}")
        return register_build(folder, file)

    def _inside(self, path: str, what: str) -> Path:
        """Return a file or folder of the task. Raises TaskError."""
        root = self._path.parent.resolve()
        found = (root / path).resolve()
        if not found.is_relative_to(root):
            raise TaskError(f"{self._path.name}: {what}: {ascii(path)[:80]} is not in the folder of the task")
        return found

    def _after(self, name: str, keys: Mapping[str, Any]) -> dict[str, Condition]:
        value = keys.get("depends_on") or {}
        if isinstance(value, list):
            return {str(one): "service_started" for one in value}
        found: dict[str, Condition] = {}
        for other, table in _mapping(value, f"services.{name}.depends_on").items():
            asked = _mapping(table, f"services.{name}.depends_on.{other}").get("condition", "service_started")
            if not isinstance(asked, str) or asked not in CONDITIONS:
                raise self._refused(f"services.{name}.depends_on.{other}: {ascii(asked)[:40]}")
            found[other] = CONDITIONS[asked]
        return found

    def _health(self, name: str, value: object) -> Health | None:
        table = _mapping(value, f"services.{name}.healthcheck")
        test = table.get("test")
        if not table or self._flag(table, "disable", f"{name}.healthcheck") or test in (None, [], ["NONE"]):
            return None
        words = [self._text(word) for word in (["CMD-SHELL", test] if isinstance(test, str) else _list(test))]
        argv = ("/bin/sh", "-c", *words[1:]) if words[0] == "CMD-SHELL" else tuple(words[1:])
        if words[0] not in ("CMD", "CMD-SHELL") or not words[1:]:
            raise self._refused(f"services.{name}.healthcheck.test")
        where = f"{self._path.name}: services.{name}.healthcheck."
        times = {key: seconds(table.get(key), usual, f"{where}{key}: ") for key, usual in _TIMES.items()}
        tries = self._number(table.get("retries") or 3, f"services.{name}.healthcheck.retries")
        whole = times["start_period"] + tries * (times["interval"] + times["timeout"])
        return Health(argv=argv, deadline_s=deadline_of(whole), timeout_s=times["timeout"])

    def _volumes(self, name: str, keys: Mapping[str, Any]) -> tuple[list[str], list[Mount]]:
        volumes: list[str] = []
        mounts: list[Mount] = []
        for item in _list(keys.get("volumes")):
            source, _, rest = item.partition(":")
            target, _, mode = rest.partition(":")
            what = f"services.{name}.volumes: {ascii(item)[:80]}"
            if name == self._own and item.startswith("${"):
                continue  # folders of logs of the other harness
            if (
                not PurePosixPath(target).is_absolute()
                or mode not in ("", "rw", "ro")
                or _UNSAFE.search(item)
            ):
                raise self._refused(what)
            if source in self._declared:
                volumes.append(item.removesuffix(":rw"))
            elif source.startswith("./") and mode == "ro" and name != self._own:
                found = self._inside(source, what)
                if not found.exists():
                    raise TaskError(f"{self._path.name}: {what}: there is no such file")
                root = self._path.parent.resolve()
                inside = found.relative_to(root).as_posix()
                if _UNSAFE.search(inside):  # a link may lead to any name
                    raise self._refused(f"{what}: the file {ascii(inside)[:80]}")
                mounts.append(Mount(folder=register_build(root), source=inside, target=target))
            else:
                raise self._refused(what)
        return volumes, mounts


def deadline_of(seconds: float) -> float:
    """Return how long a container may take to become healthy, given what its file allows."""
    return min(MOST_DEADLINE_S, max(LEAST_DEADLINE_S, seconds))


_TIMES = {"interval": 30.0, "timeout": 30.0, "start_period": 0.0}


def seconds(value: object, default: float, where: str = "") -> float:
    """Return the duration of `1m30s`; raise TaskError."""
    if value is None:
        return default
    parts = _PART.findall(str(value))
    whole = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    if not parts or "".join(number + unit for number, unit in parts) != str(value) or whole > MOST_S:
        raise TaskError(f"{where}{ascii(value)[:40]} is no duration like 1m30s")
    return whole


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _mapping(value: object, what: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise TaskError(f"{what} is not a mapping")
    return {str(key): item for key, item in value.items()}


def _list(value: object) -> list[str]:
    if value is None:
        return []
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or any(isinstance(item, dict | list) for item in value):
        raise TaskError(f"{ascii(value)[:80]} is not a list of texts")
    return [_plain(item) for item in value]


def _names(value: object) -> list[str]:
    return sorted(map(str, value)) if isinstance(value, dict) else _list(value)
