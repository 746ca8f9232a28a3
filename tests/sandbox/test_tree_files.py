"""Moving files in and out of a sandbox that an agent may have booby-trapped, in both local modes."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from sandbox_rig import out, python, sh

from insitu.errors import SandboxError
from insitu.sandbox.base import SandboxSpec
from insitu.sandbox.local import LocalBackend, LocalSandbox
from insitu.sandbox.rootfs import root_trouble
from insitu.sandbox.supervised_sandbox import SupervisedSandbox
from insitu.sandbox.tree import TreeTooLarge
from insitu.types import FileEntry

pytestmark = pytest.mark.slow

FILES = {
    "a.py": FileEntry(content=b"print(1)\n"),
    "pkg/deep/run.sh": FileEntry(content=b"#!/bin/sh\necho ran\n", executable=True),
    "empty": FileEntry(content=b""),
    "b\xe9 with space": FileEntry(content=bytes(range(256))),
}


async def test_wipe_empties_every_writable_place(sandbox: LocalSandbox) -> None:
    await python(
        sandbox,
        """
import os
for top in ("/work", "/home/agent", "/tmp", "/dev/shm", "/var/tmp"):
    os.chdir(top)
    open(".hidden", "w").write("x"); open("file", "w").write("x"); os.symlink("/usr", "usr")
    os.mkdir("shut"); open("shut/f", "w").write("x"); os.mkdir("shut/more"); os.chmod("shut/more", 0)
    os.chmod("shut", 0) if top != "/var/tmp" else None
    if top == "/tmp": break
os.chdir("/work")
for _ in range(3000):
    os.mkdir("d"); os.chdir("d")
""",
    )
    await sandbox.kill_all()
    await sandbox.wipe()
    assert await out(sandbox, "find /work /home/agent /tmp /dev/shm -mindepth 1 | wc -l") == "0"
    await sandbox.put_tree(FILES)
    assert await sandbox.get_tree() == FILES
    assert await out(sandbox, "touch /work/x /tmp/x ~/x /dev/shm/x && echo ok") == "ok"


async def test_wipe_survives_a_closed_work_folder(sandbox: LocalSandbox) -> None:
    await sh(sandbox, "mkdir d; chmod 0 /work/d /work /tmp ~")
    await sandbox.wipe()
    assert await out(sandbox, "touch /work/x /tmp/x ~/x && echo ok") == "ok"


async def test_what_is_roots_no_process_of_the_sandbox_can_change(backend: LocalBackend) -> None:
    if "file_owner" not in backend.capabilities:
        pytest.skip("only root can give files away")
    async with await backend.create(SandboxSpec()) as sandbox:
        await sandbox.put_tree(
            {"t/a.py": FileEntry(content=b"a\n"), "b": FileEntry(content=b"b\n")}, owner="root"
        )
        tried = "echo x >> t/a.py; mv t u; rm -f b t/a.py; mv b c; chmod 777 t/a.py t .; echo mine > t/new"
        await sh(sandbox, tried)
        tree = await sandbox.get_tree()
        assert {path: entry.content for path, entry in tree.items()} == {
            "b": b"b\n", "t/a.py": b"a\n", "t/new": b"mine\n",
        }  # fmt: skip
        await sandbox.put_tree({"d": FileEntry(content=b"")})
        assert await out(sandbox, "echo more >> d; echo e > e; cat d") == "more"


async def test_laid_files_take_the_place_of_whatever_stands_in_their_way(backend: LocalBackend) -> None:
    async with await backend.create(SandboxSpec(files=FILES)) as sandbox:
        await sh(
            sandbox,
            "ln -s /tmp links; mkdir -p dir/in/a; echo x > dir/in/a/f; ln -s /etc/passwd out; echo > f",
        )
        owner = await out(sandbox, "echo kept > /tmp/x; stat -c %U /tmp/x")
        laid = {name: FileEntry(content=b"laid") for name in ("links/x", "dir/in", "out", "f/g")}
        await sandbox.lay(laid, remove=("pkg", "links/x", "no/such", "a.py"), owner="root")
        tree = await sandbox.get_tree()
        assert {path: tree[path].content for path in laid} == dict.fromkeys(laid, b"laid")
        assert set(tree) == {*laid, "empty", "b\xe9 with space"}
        assert await out(sandbox, "cat /tmp/x; stat -c %U /tmp/x") == f"kept\n{owner}"
        if "file_owner" in backend.capabilities:
            await sh(sandbox, "echo no > out; rm -rf links out f; mv dir e")
            assert (await sandbox.get_tree())["out"].content == b"laid"
            assert (await sandbox.get_tree())["dir/in"].content == b"laid"


async def test_one_file_is_read_only_when_it_is_a_regular_one(backend: LocalBackend) -> None:
    async with await backend.create(SandboxSpec(places=("/logs", "/tests"))) as sandbox:
        await sandbox.put("/tests/t.sh", b"echo 1 > /logs/r\n")
        await sh(
            sandbox, "sh /tests/t.sh; ln -s r /logs/l; mkfifo /logs/p; mkdir /logs/d; ln -s /logs /logs/d/up"
        )
        assert await sandbox.get("/logs/r") == b"1\n"
        for path in ("/logs/l", "/logs/p", "/logs/d", "/logs/d/up/r", "/logs/none", "/logs/r/x"):
            assert await sandbox.get(path) is None
        with pytest.raises(TreeTooLarge):
            await sandbox.get("/logs/r", max_bytes=1)
        with pytest.raises(SandboxError):
            await sandbox.get("/etc/passwd")
        await sandbox.wipe()
        assert await sandbox.get("/logs/r") is None


async def test_a_tool_s_folder_that_does_not_fit_is_left_out_and_the_rest_is_read(
    backend: LocalBackend,
) -> None:
    async with await backend.create(SandboxSpec()) as sandbox:
        await sh(
            sandbox,
            "mkdir -p a/node_modules/x build zz; for i in $(seq 40); do echo > a/node_modules/x/$i; done;"
            "echo 1 > build/out.py; echo 2 > zz/app.py",
        )
        assert sorted(await sandbox.get_tree(max_files=20)) == ["build/out.py", "zz/app.py"]
        assert len(await sandbox.get_tree(max_files=60)) == 42
        await sh(
            sandbox, "for n in $(seq 9); do mkdir -p $n/dist; truncate -s 900K $n/dist/a $n/dist/b; done"
        )
        assert "zz/app.py" in await sandbox.get_tree(max_bytes=1 << 20)


def test_a_file_of_the_work_folder_has_no_second_name_by_a_root_around_it(tmp_path: Path) -> None:
    """Protected files are known by their names in the work folder."""
    places = {"/home/user/work": tmp_path / "work", "/home/user": tmp_path}
    (tmp_path / "work").mkdir()
    for name in ("work/check.py", "answer"):
        (tmp_path / name).write_text("x")
    folders = {place: os.open(path, os.O_RDONLY) for place, path in places.items()}
    spec = SandboxSpec(workdir="/home/user/work", roots=("/home/user",))
    held = SimpleNamespace(_spec=spec, _folders=folders, _trees=lambda: tuple(places))
    try:
        assert {*SupervisedSandbox._read(held, 100, 10)} == {"check.py", "/home/user/answer"}  # type: ignore[arg-type]
    finally:
        for folder in folders.values():
            os.close(folder)


@pytest.mark.parametrize("root", ["/etc/passwd", "/usr/share", "/tmp/x", "/", "/work/inner"])
def test_a_root_that_is_the_machines_or_the_sandboxs_own_is_refused(root: str) -> None:
    assert root_trouble((root,), "/work").startswith(f"{root} cannot be one of a task's roots")
    assert not root_trouble(("/etc", "/srv/data"), "/work")
