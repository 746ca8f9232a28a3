"""Contract of the files of a sandbox."""

from __future__ import annotations

import pytest

from insitu.errors import SandboxError
from insitu.sandbox.base import Sandbox, SandboxBackend, SandboxSpec
from insitu.sandbox.tree import TreeTooLarge
from insitu.types import FileEntry
from insitu_lab.testing.shell import run, shell

FILES = {
    "a.py": FileEntry(content=b"print(1)\n"),
    "pkg/run.sh": FileEntry(content=b"#!/bin/sh\necho ran\n", executable=True),
    "empty": FileEntry(content=b""),
    "b\xe9 with space": FileEntry(content=bytes(range(256))),
}
"""Content of the work folder of the fixture `sandbox`."""


SPECIAL_FILES = """
import os, socket
os.symlink("/etc/passwd", "link"); os.symlink("/", "rootlink"); os.mkfifo("pipe"); os.symlink("self", "self")
s = socket.socket(socket.AF_UNIX); s.bind("sock")
open(b"bad-\\xff", "w").write("x"); os.mkdir(b"dir-\\xff")
os.mkdir("shut"); open("shut/in", "w").write("s"); os.chmod("shut/in", 0); os.chmod("shut", 0)
"""


class FileContract:
    """`put`, `get`, trees, owners, caps and `wipe`."""

    async def test_a_tree_goes_in_and_comes_out_unchanged(self, sandbox: Sandbox) -> None:
        assert await sandbox.get_tree() == FILES
        assert await run(sandbox, "pkg/run.sh") == "ran"

    async def test_changes_come_out(self, sandbox: Sandbox) -> None:
        await shell(sandbox, "echo 2 >> a.py; rm empty; mkdir new; echo n > new/file; chmod +x new/file")
        tree = await sandbox.get_tree()
        assert tree["a.py"].content == b"print(1)\n2\n"
        assert "empty" not in tree
        assert tree["new/file"] == FileEntry(content=b"n\n", executable=True)

    async def test_put_tree_replaces_and_lay_adds(self, sandbox: Sandbox) -> None:
        await sandbox.put_tree({"only": FileEntry(content=b"x"), "d/e": FileEntry(content=b"y")})
        assert sorted(await sandbox.get_tree()) == ["d/e", "only"]
        await sandbox.lay({"d/f": FileEntry(content=b"z")}, remove=["only"])
        assert sorted(await sandbox.get_tree()) == ["d/e", "d/f"]

    async def test_lay_replaces_what_is_in_the_way_and_follows_nothing(self, sandbox: Sandbox) -> None:
        await shell(
            sandbox,
            "rm -rf * && mkdir ~/out && echo old > ~/out/f && ln -s ~/out d && ln -s ~/out/f f && mkdir g",
        )
        await sandbox.lay({name: FileEntry(content=b"new") for name in ("d/f", "f", "g")})
        assert {path: entry.content for path, entry in (await sandbox.get_tree()).items()} == {
            "d/f": b"new", "f": b"new", "g": b"new",
        }  # fmt: skip
        assert await run(sandbox, "cat ~/out/f") == "old"

    async def test_files_of_root_cannot_be_touched(self, backend: SandboxBackend) -> None:
        if "file_owner" not in backend.capabilities:
            pytest.skip("the namespaces mode needs root")
        async with await backend.create(SandboxSpec()) as sandbox:
            await sandbox.put_tree({"t/hidden.py": FileEntry(content=b"true")}, owner="root")
            for script in (
                "echo x > t/hidden.py", "rm -f t/hidden.py", "mv t/hidden.py t/x", "mv t u",
                "chmod 777 t t/hidden.py", "rm -rf t; test ! -e t",
            ):  # fmt: skip
                assert (await shell(sandbox, script)).exit_code != 0, script
            assert await run(sandbox, "cat t/hidden.py; echo own > t/own.py; cat t/own.py") == "trueown"

    async def test_links_pipes_sockets_and_odd_names_are_left_out(self, sandbox: Sandbox) -> None:
        await sandbox.put_tree({"good": FileEntry(content=b"g")})
        assert (await sandbox.exec(["python3", "-c", SPECIAL_FILES], timeout_s=20)).exit_code == 0
        assert await sandbox.get_tree() == {
            "good": FileEntry(content=b"g"),
            "shut/in": FileEntry(content=b"s"),
        }

    @pytest.mark.parametrize(
        "plant",
        [
            "head -c 2000000 /dev/zero > big",
            "truncate -s 500G sparse",
            "for i in $(seq 30); do echo > f$i; done",
            "for i in $(seq 1200); do ln -s x l$i; done",
        ],
        ids=["bytes", "sparse", "files", "entries"],
    )
    async def test_a_tree_over_a_cap_is_the_agents_doing(self, sandbox: Sandbox, plant: str) -> None:
        await shell(sandbox, plant)
        with pytest.raises(TreeTooLarge) as caught:
            await sandbox.get_tree(max_bytes=1 << 20, max_files=20)
        assert not caught.value.infra

    async def test_what_lies_deeper_than_any_path_leads_is_left_out(self, sandbox: Sandbox) -> None:
        plant = "p=.; for i in $(seq {}); do p=$p/d; done; mkdir -p $p; echo 1 > $p/{}"
        await shell(sandbox, plant.format(80, "deep"))
        await shell(sandbox, plant.format(300, "deeper"))
        found = await sandbox.get_tree(max_bytes=1 << 20)
        assert [path for path in found if path.startswith("d/")] == ["d/" * 80 + "deep"]

    async def test_put_and_get_one_file(self, sandbox: Sandbox) -> None:
        await sandbox.put("/home/agent/.config/tool/key", bytes(range(256)))
        assert await sandbox.get("/home/agent/.config/tool/key") == bytes(range(256))
        await sandbox.put("/tmp/run", b"#!/bin/sh\necho hi\n", executable=True)
        assert await run(sandbox, "/tmp/run") == "hi"
        assert await sandbox.get("/tmp/none") is None
        with pytest.raises(SandboxError):
            await sandbox.get("/home/agent/.config/tool/key", max_bytes=255)

    async def test_get_reads_no_link_pipe_or_folder(self, sandbox: Sandbox) -> None:
        await shell(sandbox, "mkfifo p; ln -s /etc/passwd l; mkdir d; ln -s /etc e")
        for path in ("p", "l", "d", "e/passwd"):
            assert await sandbox.get(f"/work/{path}") is None, path

    @pytest.mark.parametrize(
        "path", ["/usr/x", "/work/../usr/x", "/work", "relative", "/home/agent/a/../../x"]
    )
    async def test_put_stays_inside(self, sandbox: Sandbox, path: str) -> None:
        with pytest.raises(SandboxError):
            await sandbox.put(path, b"x")

    @pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x", ""])
    async def test_a_tree_with_a_path_outside_is_refused(self, sandbox: Sandbox, path: str) -> None:
        with pytest.raises(SandboxError):
            await sandbox.put_tree({path: FileEntry(content=b"x")})

    async def test_put_follows_no_link(self, sandbox: Sandbox) -> None:
        await shell(sandbox, "ln -s /home/agent dir; echo old > ~/target; ln -s ~/target f")
        with pytest.raises(SandboxError):
            await sandbox.put("/work/dir/x", b"x")
        await sandbox.put("/work/f", b"new")
        assert await run(sandbox, "cat ~/target; cat f") == "old\nnew"

    async def test_more_places_can_be_had(self, backend: SandboxBackend) -> None:
        async with await backend.create(SandboxSpec(places=("/logs",))) as sandbox:
            assert await run(sandbox, "echo 1 > /logs/reward && ls -A /logs") == "reward"
            assert await sandbox.get("/logs/reward") == b"1\n"

    async def test_roots_belong_to_the_tree_by_their_absolute_paths(self, backend: SandboxBackend) -> None:
        if "roots" not in backend.capabilities:
            pytest.skip("harbor: only the work folder is read")
        async with await backend.create(SandboxSpec(roots=("/home/user/work", "/etc"))) as sandbox:
            named = {"a": b"a", "/home/user/work/b/c": b"c", "/etc/app/conf": b"d"}
            await sandbox.lay({path: FileEntry(content=content) for path, content in named.items()})
            assert await run(sandbox, "cat a /home/user/work/b/c /etc/app/conf; id -un") == "acdagent"
            await shell(
                sandbox, "echo 42 > /home/user/work/answer; echo x >> /etc/app/conf; rm /home/user/work/b/c"
            )
            tree = await sandbox.get_tree()
            assert tree["/home/user/work/answer"].content == b"42\n"
            assert tree["/etc/app/conf"].content == b"dx\n"
            assert {"a", "/etc/passwd"} <= {*tree}
            assert "/home/user/work/b/c" not in tree
            await sandbox.lay({}, remove=["/home/user/work/answer", "a"])
            assert {"/home/user/work/answer", "a"}.isdisjoint(await sandbox.get_tree())
            with pytest.raises(SandboxError):
                await sandbox.lay({"/home/user/other": FileEntry(content=b"")})

    async def test_wipe_empties_every_writable_place(self, sandbox: Sandbox) -> None:
        await shell(
            sandbox,
            "for p in /work ~ /tmp /dev/shm /var/tmp; do mkdir $p/d; echo > $p/d/f; chmod 0 $p/d; done",
        )
        await sandbox.kill_all()
        await sandbox.wipe()
        assert await run(sandbox, "find /work ~ /tmp /dev/shm /var/tmp/ -mindepth 1 | wc -l") == "0"
        assert await run(sandbox, "touch /work/x /tmp/x ~/x && echo ok") == "ok"

    async def test_a_full_disk_affects_one_sandbox_only(self, sandbox: Sandbox) -> None:
        result = await shell(sandbox, "head -c 400000000 /dev/zero > /tmp/fill")
        assert result.exit_code != 0
        assert b"No space" in result.stderr
        await sandbox.wipe()
        assert await run(sandbox, "echo ok > /tmp/x && cat /tmp/x") == "ok"
