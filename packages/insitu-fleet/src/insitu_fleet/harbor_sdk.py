"""The only imports of Harbor, at the point of use, and protocols for the part of its interface in use."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from insitu.errors import ImageMissing, InsituError, SandboxStartError, SandboxTransient, SetupError
from insitu.install_hints import install_extra
from insitu.sandbox.base import SandboxSpec


class Flags(Protocol):
    """harbor.environments.capabilities.EnvironmentCapabilities, the part in use."""

    disable_internet: bool
    network_allowlist: bool


class Result(Protocol):
    stdout: str | None
    stderr: str | None
    return_code: int


class Environment(Protocol):
    """harbor.environments.base.BaseEnvironment, the part in use."""

    @property
    def capabilities(self) -> Flags: ...

    async def start(self, force_build: bool) -> None: ...

    async def stop(self, delete: bool) -> None: ...

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> Result: ...

    async def upload_file(self, source_path: Path | str, target_path: str) -> None: ...

    async def download_file(self, source_path: str, target_path: Path | str) -> None: ...


Factory = Callable[[SandboxSpec, Path], Environment]
"""(spec, host folder of the environment) -> environment, not started; `label` of the spec is its name."""


def of_kind(kind: str) -> Factory:
    """Return the factory of an environment of Harbor (`e2b`, `docker`, ...). Raises SetupError."""
    try:
        factory = importlib.import_module("harbor.environments.factory").EnvironmentFactory
        kinds = importlib.import_module("harbor.models.environment_type").EnvironmentType
        config: Any = importlib.import_module("harbor.models.task.config")
        paths = importlib.import_module("harbor.models.trial.paths").TrialPaths
    except ImportError as error:
        raise SetupError(
            f"the harbor backend is not usable ({error}); install Harbor with"
            f" `{install_extra('harbor')}` on Python 3.12 or newer"
        ) from error
    try:
        chosen = kinds(kind)
    except ValueError as error:
        known = ", ".join(sorted(each.value for each in kinds))
        raise SetupError(f"Harbor has no environment {kind!r} (known: {known})") from error

    def make(spec: SandboxSpec, folder: Path) -> Environment:
        modes, hosts = config.NetworkMode, []
        mode = modes.NO_NETWORK if spec.network == "none" else modes.PUBLIC
        if spec.network == "gateway_only":
            mode, hosts = modes.ALLOWLIST, [urlsplit(spec.gateway_url).hostname]
        made: Environment = factory.create_environment(
            type=chosen,
            environment_dir=folder,
            environment_name="insitu",
            session_id=spec.label,
            trial_paths=paths(folder),
            task_env_config=config.EnvironmentConfig(docker_image=spec.image),
            network_policy=config.NetworkPolicy(network_mode=mode, allowed_hosts=hosts),
        )
        return made

    return make


@contextlib.contextmanager
def foreign(kind: type[InsituError], doing: str) -> Iterator[None]:
    """Convert every exception of Harbor and of the vendors' libraries to `kind`."""
    try:
        yield
    except InsituError:
        raise
    except Exception as error:
        said = f"{doing}: {str(error).strip() or type(error).__name__}".splitlines()[0]
        if type(error).__name__ == "SandboxBuildFailedError":
            raise ImageMissing(said) from error
        if isinstance(error, ConnectionError | TimeoutError) and not issubclass(kind, SandboxStartError):
            raise SandboxTransient(said) from error
        raise kind(said) from error
