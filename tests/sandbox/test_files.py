"""Moving files in and out of a box that an agent may have booby-trapped, in both local modes."""

from __future__ import annotations

import pytest
from sandbox_rig import out, python, sh

from whet.errors import SandboxError
from whet.sandbox.base import SandboxSpec
from whet.sandbox.local import LocalBackend, LocalSandbox
from whet.sandbox.tree import TreeTooLarge
from whet.types import FileEntry

FILES = {
    "a.py": FileEntry(content=b"print(1)\n"),
    "pkg/deep/run.sh": FileEntry(content=b"#!/bin/sh\necho ran\n", executable=True),
    "empty": FileEntry(content=b""),
    "b\xe9 with space": FileEntry(content=bytes(range(256))),
}


async def test_tree_goes_in_and_comes_out_unchanged(backend: LocalBackend) -> None:
    async with await backend.create(SandboxSpec(files=FILES)) as box:
        assert await box.get_tree() == FILES
        assert await out(box, "pkg/deep/run.sh; stat -c %U a.py pkg") == "ran\nagent\nagent"
        await sh(box, "echo 2 >> a.py; rm empty; mkdir new; echo n > new/file; chmod +x new/file")
        tree = await box.get_tree()
        assert tree["a.py"].content == b"print(1)\n2\n"
        assert "empty" not in tree
        assert tree["new/file"] == FileEntry(content=b"n\n", executable=True)
        await box.put_tree({"only": FileEntry(content=b"x")})
        assert list(await box.get_tree()) == ["only"]


async def test_links_pipes_sockets_and_odd_names_are_left_out(box: LocalSandbox) -> None:
    plant = """
import os, socket
os.symlink("/etc/passwd", "link"); os.symlink("/", "rootlink"); os.mkfifo("pipe"); os.symlink("link", "loop2")
os.symlink("self", "self")
s = socket.socket(socket.AF_UNIX); s.bind("sock")
open(b"bad-\\xff", "w").write("x"); os.mkdir(b"dir-\\xff"); open("good", "w").write("g")
os.mkdir("shut"); open("shut/in", "w").write("s"); os.chmod("shut/in", 0); os.chmod("shut", 0)
"""
    await python(box, plant)
    assert await box.get_tree() == {
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
        "p=.; for i in $(seq 80); do p=$p/d; done; mkdir -p $p; echo > $p/f",
    ],
    ids=["bytes", "sparse", "files", "entries", "depth"],
)
async def test_caps_are_the_agents_doing(box: LocalSandbox, plant: str) -> None:
    await sh(box, plant)
    with pytest.raises(TreeTooLarge) as caught:
        await box.get_tree(max_bytes=1 << 20, max_files=20)
    assert not caught.value.infra


async def test_put_stays_inside_and_follows_no_link(box: LocalSandbox) -> None:
    await box.put("/home/agent/.config/tool/key", b"k")
    assert await out(box, "cat ~/.config/tool/key; stat -c %U%a ~/.config/tool/key") == "kagent644"
    await box.put("/tmp/run", b"#!/bin/sh\necho hi\n", executable=True)
    assert await out(box, "/tmp/run") == "hi"
    for path in ("/usr/x", "/work/../usr/x", "/work", "relative", "/home/agent/a/../../x"):
        with pytest.raises(SandboxError):
            await box.put(path, b"x")
    await sh(
        box, "ln -s /home/agent /work/dir; echo old > /home/agent/target; ln -s /home/agent/target /work/f"
    )
    with pytest.raises(SandboxError):
        await box.put("/work/dir/x", b"x")
    await box.put("/work/f", b"new")
    assert await out(box, "cat /home/agent/target; cat /work/f; test ! -L /work/f") == "old\nnew"


async def test_wipe_empties_every_writable_place(box: LocalSandbox) -> None:
    await python(
        box,
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
    await box.kill_all()
    await box.wipe()
    assert await out(box, "find /work /home/agent /tmp /dev/shm -mindepth 1 | wc -l") == "0"
    await box.put_tree(FILES)
    assert await box.get_tree() == FILES
    assert await out(box, "touch /work/x /tmp/x ~/x /dev/shm/x && echo ok") == "ok"


async def test_wipe_survives_a_closed_work_folder(box: LocalSandbox) -> None:
    await sh(box, "mkdir d; chmod 0 /work/d /work /tmp ~")
    await box.wipe()
    assert await out(box, "touch /work/x /tmp/x ~/x && echo ok") == "ok"


async def test_a_full_disk_is_the_boxs_own(box: LocalSandbox) -> None:
    result = await sh(box, "head -c 400000000 /dev/zero > /tmp/fill")
    assert result.exit_code != 0
    assert b"No space" in result.stderr
    await box.wipe()
    assert await out(box, "echo ok > /tmp/x && cat /tmp/x") == "ok"
