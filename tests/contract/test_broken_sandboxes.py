"""The contract of sandboxes catches broken backends: each fault makes the test that is named fail.

Each backend is the local one with one fault, so no command of the contract runs outside of a sandbox.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from insitu.errors import InsituError, PolicyUnsupported, SandboxError
from insitu.sandbox.base import Capability, ExecResult, Sandbox, SandboxSpec
from insitu.sandbox.local import LocalBackend
from insitu.types import Tree
from insitu_lab.testing import SandboxContract
from insitu_lab.testing.sandbox_files import FILES

pytestmark = pytest.mark.slow


class SoundSandbox:
    """A local sandbox; subclasses have one fault."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def __aenter__(self) -> SoundSandbox:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self.inner.close()

    async def exec(self, argv: Sequence[str], **options: Any) -> ExecResult:
        result: ExecResult = await self.inner.exec(argv, **options)
        return result


class SoundBackend:
    """The local backend; subclasses have one fault."""

    name = "mine"
    sandbox: type[SoundSandbox] = SoundSandbox

    def __init__(self) -> None:
        self.inner, self.opened = LocalBackend(), list[Any]()

    @property
    def capabilities(self) -> frozenset[Capability]:
        return self.inner.capabilities

    async def create(self, spec: SandboxSpec) -> Sandbox:
        self.opened.append(await self.inner.create(spec))
        made: Any = self.sandbox(self.opened[-1])
        return made  # type: ignore[no-any-return]


class KilledIsZero(SoundSandbox):
    async def exec(self, argv: Sequence[str], **options: Any) -> ExecResult:
        result = await super().exec(argv, **options)
        return replace(result, exit_code=max(result.exit_code or 0, 0) % 128)


class DropsInput(SoundSandbox):
    async def exec(self, argv: Sequence[str], **options: Any) -> ExecResult:
        return await super().exec(argv, **{**options, "stdin": options.get("stdin", b"")[:1000]})


class IgnoresEnvironment(SoundSandbox):
    async def exec(self, argv: Sequence[str], **options: Any) -> ExecResult:
        return await super().exec(argv, **{**options, "env": None})


class IgnoresTheFolder(SoundSandbox):
    async def exec(self, argv: Sequence[str], **options: Any) -> ExecResult:
        return await super().exec(argv, **{**options, "cwd": None})


class StartsInTheRoot(SoundSandbox):
    async def exec(self, argv: Sequence[str], **options: Any) -> ExecResult:
        return await super().exec(argv, **{"cwd": "/", **options})


class JoinsArguments(SoundSandbox):
    async def exec(self, argv: Sequence[str], **options: Any) -> ExecResult:
        return await super().exec(["sh", "-c", " ".join(argv)], **options)


class MissingIsOne(SoundSandbox):
    async def exec(self, argv: Sequence[str], **options: Any) -> ExecResult:
        result = await super().exec(argv, **options)
        return replace(result, exit_code=1) if result.exit_code in (126, 127) else result


class CleansArguments(SoundSandbox):
    async def exec(self, argv: Sequence[str], **options: Any) -> ExecResult:
        return await super().exec([word.replace("\0", "") for word in argv] or ["true"], **options)


class HidesACut(SoundSandbox):
    async def exec(self, argv: Sequence[str], **options: Any) -> ExecResult:
        return replace(await super().exec(argv, **options), truncated=False)


class HidesATimeout(SoundSandbox):
    async def exec(self, argv: Sequence[str], **options: Any) -> ExecResult:
        return replace(await super().exec(argv, **options), timed_out=False)


class DropsOutputAtATimeout(SoundSandbox):
    async def exec(self, argv: Sequence[str], **options: Any) -> ExecResult:
        result = await super().exec(argv, **options)
        return replace(result, stdout=b"") if result.timed_out else result


class LeaksEnvironment(SoundSandbox):
    async def exec(self, argv: Sequence[str], **options: Any) -> ExecResult:
        secret = {"HOST_SECRET": os.environ["HOST_SECRET"]} if "HOST_SECRET" in os.environ else {}
        return await super().exec(argv, **{**options, "env": {**secret, **(options.get("env") or {})}})


class DropsTheExecutableBit(SoundSandbox):
    async def get_tree(self, **options: Any) -> Tree:
        found: Tree = await self.inner.get_tree(**options)
        return {path: replace(entry, executable=False) for path, entry in found.items()}


class RemembersTheTree(SoundSandbox):
    async def get_tree(self, **options: Any) -> Tree:
        return FILES


class AddsOnly(SoundSandbox):
    async def put_tree(self, files: Tree, **options: Any) -> None:
        await self.inner.lay(files)


class RemovesNothing(SoundSandbox):
    async def lay(self, files: Tree, *, remove: Sequence[str] = (), **options: Any) -> None:
        await self.inner.lay(files, **options)


class PutsAnywhere(SoundSandbox):
    async def put(self, path: str, content: bytes, **options: Any) -> None:
        with suppress(SandboxError):
            await self.inner.put(path, content, **options)


class PutsTreesAnywhere(SoundSandbox):
    async def put_tree(self, files: Tree, **options: Any) -> None:
        with suppress(SandboxError):
            await self.inner.put_tree(files, **options)


class FollowsLinks(SoundSandbox):
    async def get(self, path: str, **options: Any) -> bytes | None:
        return (await self.inner.exec(["cat", path], timeout_s=1)).stdout or None


class MissingIsEmpty(SoundSandbox):
    async def get(self, path: str, **options: Any) -> bytes | None:
        return await self.inner.get(path, **options) or b""


class IgnoresCaps(SoundSandbox):
    async def get_tree(self, **options: Any) -> Tree:
        found: Tree = await self.inner.get_tree()
        return found


class WipesNothing(SoundSandbox):
    async def wipe(self) -> None: ...


class KillsNothing(SoundSandbox):
    async def kill_all(self) -> None: ...


class ClosesOnce(SoundSandbox):
    closed = False

    async def close(self) -> None:
        if self.closed:
            raise SandboxError("closed already")
        self.closed = True
        await self.inner.close()


class ClosesNothing(SoundSandbox):
    async def close(self) -> None: ...


class OneForAll(SoundBackend):
    """Return the same sandbox each time."""

    async def create(self, spec: SandboxSpec) -> Sandbox:
        return await super().create(spec) if not self.opened else self.sandbox(self.opened[0])  # type: ignore[return-value]


class AcceptsAnything(SoundBackend):
    async def create(self, spec: SandboxSpec) -> Sandbox:
        try:
            return await super().create(spec)
        except PolicyUnsupported:
            return await super().create(SandboxSpec())


def of(sandbox: type[SoundSandbox]) -> type[SoundBackend]:
    """Return the backend of such sandboxes."""
    return type(sandbox.__name__, (SoundBackend,), {"sandbox": sandbox})


STREAMS = "test_exec_gives_code_streams_and_takes_input_folder_and_environment"
CASES: list[tuple[type[SoundBackend], str, Mapping[str, object]]] = [
    (of(KilledIsZero), "test_a_killed_command_is_not_exit_zero", {}),
    (of(DropsInput), "test_input_of_megabytes_arrives_whole", {}),
    (of(IgnoresEnvironment), STREAMS, {}),
    (of(IgnoresTheFolder), STREAMS, {}),
    (of(IgnoresTheFolder), "test_missing_folder_is_an_ordinary_failure", {}),
    (of(StartsInTheRoot), "test_exec_begins_in_the_work_folder", {}),
    (of(JoinsArguments), "test_arguments_reach_the_program_unchanged", {}),
    (of(MissingIsOne), "test_missing_command_is_an_ordinary_failure", {}),
    (of(MissingIsOne), "test_missing_folder_is_an_ordinary_failure", {}),
    (of(CleansArguments), "test_no_command_and_a_nul_are_refused", {}),
    (of(HidesACut), "test_output_is_bounded_and_says_so", {}),
    (of(HidesATimeout), "test_a_timeout_kills_the_whole_tree", {}),
    (of(KilledIsZero), "test_what_a_timeout_killed_cannot_go_on_to_exit_zero", {}),
    (of(DropsOutputAtATimeout), "test_output_before_a_timeout_is_kept", {}),
    (of(LeaksEnvironment), "test_the_hosts_environment_does_not_leak", {"tmp_path": Path("/nowhere")}),
    (of(DropsTheExecutableBit), "test_a_tree_goes_in_and_comes_out_unchanged", {}),
    (of(RemembersTheTree), "test_changes_come_out", {}),
    (of(AddsOnly), "test_put_tree_replaces_and_lay_adds", {}),
    (of(RemovesNothing), "test_put_tree_replaces_and_lay_adds", {}),
    (of(PutsAnywhere), "test_put_stays_inside", {"path": "/usr/x"}),
    (of(PutsAnywhere), "test_put_follows_no_link", {}),
    (of(PutsTreesAnywhere), "test_a_tree_with_a_path_outside_is_refused", {"path": "../x"}),
    (of(FollowsLinks), "test_get_reads_no_link_pipe_or_folder", {}),
    (of(MissingIsEmpty), "test_put_and_get_one_file", {}),
    (
        of(IgnoresCaps),
        "test_a_tree_over_a_cap_is_the_agents_doing",
        {"plant": "seq 999999 > b"},
    ),
    (of(WipesNothing), "test_wipe_empties_every_writable_place", {}),
    (of(KillsNothing), "test_kill_all_finds_daemons_and_spares_spawned", {}),
    (of(ClosesOnce), "test_close_ends_everything_and_may_be_called_again", {}),
    (of(ClosesNothing), "test_a_cancelled_close_finishes", {}),
    (OneForAll, "test_sandboxes_do_not_see_each_other", {}),
    (OneForAll, "test_many_sandboxes_at_once", {}),
    (AcceptsAnything, "test_an_image_is_used_or_refused", {"image": ""}),
    (
        AcceptsAnything,
        "test_more_than_is_offered_is_refused_before_start",
        {"spec": SandboxSpec(network="public"), "word": "public"},
    ),
]


async def failure(backend: SoundBackend, name: str, given: Mapping[str, object], patch: object) -> str:
    """Run one test of the contract; return how it failed, empty if it passed."""
    test: Callable[..., Any] = getattr(SandboxContract(), name)
    wanted = test.__code__.co_varnames[: test.__code__.co_argcount]
    sandbox = await backend.create(SandboxSpec(files=FILES))
    fixtures = {"backend": backend, "sandbox": sandbox, "monkeypatch": patch, **given}
    try:
        await test(**{key: value for key, value in fixtures.items() if key in wanted})
    except (AssertionError, InsituError, pytest.fail.Exception) as error:
        return repr(error)
    finally:
        for opened in backend.opened:
            await opened.close()
    return ""


@pytest.mark.parametrize(
    "sound", [False, pytest.param(True, marks=pytest.mark.full)], ids=["broken", "sound"]
)
@pytest.mark.parametrize(
    ("backend", "name", "given"), CASES, ids=[f"{case[0].__name__}-{case[1]}" for case in CASES]
)
async def test_a_broken_sandbox_is_caught(
    backend: type[SoundBackend],
    name: str,
    given: Mapping[str, object],
    sound: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failed = await failure((SoundBackend if sound else backend)(), name, given, monkeypatch)
    assert bool(failed) is not sound, failed
