"""Diffs are applied exactly, both ways, or refused in one line that names the file."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from insitu.errors import TaskError
from insitu.grading.diff import unified
from insitu.tasks.patch import apply_patch, patched_paths
from insitu.types import FileEntry, Tree


def tree(**files: str) -> Tree:
    return {name.replace("__", "/") + ".py": FileEntry(content=text.encode()) for name, text in files.items()}


BASE = tree(a="one\ntwo\nthree\n", pkg__b="x = 1\n")

CHANGE = """\
diff --git a/a.py b/a.py
index 111..222 100644
--- a/a.py
+++ b/a.py
@@ -1,3 +1,4 @@
 one
-two
+TWO
+2.5
 three
"""
NEW = """\
diff --git a/pkg/new.sh b/pkg/new.sh
new file mode 100755
index 000..222
--- /dev/null
+++ b/pkg/new.sh
@@ -0,0 +1,2 @@
+echo hi
+exit 0
"""
GONE = """\
diff --git a/pkg/b.py b/pkg/b.py
deleted file mode 100644
index 111..000
--- a/pkg/b.py
+++ /dev/null
@@ -1 +0,0 @@
-x = 1
"""
MOVED = """\
diff --git a/pkg/b.py b/pkg/c.py
similarity index 80%
rename from pkg/b.py
rename to pkg/c.py
--- a/pkg/b.py
+++ b/pkg/c.py
@@ -1 +1,2 @@
 x = 1
+y = 2
"""
MOVED_AS_IT_IS = """\
diff --git a/pkg/b.py b/pkg/c.py
similarity index 100%
rename from pkg/b.py
rename to pkg/c.py
"""


@pytest.mark.parametrize("diff", [CHANGE, NEW, GONE, MOVED, MOVED_AS_IT_IS, CHANGE + NEW + GONE])
def test_forwards_and_back(diff: str) -> None:
    after = apply_patch(BASE, diff)
    assert after != BASE
    assert apply_patch(after, diff, reverse=True) == BASE


def test_what_a_change_does() -> None:
    after = apply_patch(BASE, CHANGE + NEW + MOVED)
    assert after["a.py"].content == b"one\nTWO\n2.5\nthree\n"
    assert after["pkg/new.sh"] == FileEntry(content=b"echo hi\nexit 0\n", executable=True)
    assert after["pkg/c.py"].content == b"x = 1\ny = 2\n"
    assert "pkg/b.py" not in after
    assert patched_paths(CHANGE + NEW + MOVED) == ("a.py", "pkg/b.py", "pkg/c.py", "pkg/new.sh")


def test_missing_newlines_at_the_end() -> None:
    base = {"t": FileEntry(content=b"a\nb")}
    diff = "--- a/t\n+++ b/t\n@@ -1,2 +1,2 @@\n a\n-b\n\\ No newline at end of file\n+c\n"
    after = apply_patch(base, diff)
    assert after["t"].content == b"a\nc\n"
    assert apply_patch(after, diff, reverse=True) == base
    with pytest.raises(TaskError, match="does not apply: t, hunk 1 at line 1"):
        apply_patch({"t": FileEntry(content=b"a\nb\n")}, diff)


def test_carriage_returns_belong_to_their_lines() -> None:
    base = {"t": FileEntry(content=b"a\r\nb\rc\n")}
    diff = "--- a/t\n+++ b/t\n@@ -1,2 +1,2 @@\n a\r\n-b\rc\n+d\r\n"
    assert apply_patch(base, diff)["t"].content == b"a\r\nd\r\n"


def test_quoted_names() -> None:
    diff = '--- "a/\\303\\251.py"\n+++ "b/\\303\\251.py"\n@@ -1 +1 @@\n-x\n+y\n'
    assert apply_patch({"é.py": FileEntry(content=b"x\n")}, diff) == {"é.py": FileEntry(content=b"y\n")}


@pytest.mark.parametrize(
    ("diff", "message"),
    [
        ("", "the patch is empty"),
        ("not a diff\n", "names no file"),
        (CHANGE.replace("-two", "-zwei"), "the patch does not apply: a.py, hunk 1 at line 1"),
        (CHANGE.replace("@@ -1,3", "@@ -2,3"), "a.py, hunk 1 at line 2"),
        (CHANGE.replace("@@ -1,3 +1,4 @@", "@@ -1,9 +1,9 @@"), "not a unified diff"),
        (CHANGE.replace("a.py", "z.py"), "z.py does not exist"),
        (NEW.replace("pkg/new.sh", "a.py"), "a.py already exists"),
        (GONE.replace("@@ -1 +0,0 @@\n-x = 1\n", "@@ -1,0 +0,0 @@\n"), "not all of its lines"),
        (CHANGE.replace("a.py", "../a.py"), "leaves the folder"),
        (CHANGE.replace("/a.py", "/.git/config"), "leaves the folder"),
        (NEW.replace("100755", "120000"), "a link or a submodule: pkg/new.sh"),
        (NEW.replace("100755", "160000"), "a link or a submodule: pkg/new.sh"),
        (
            "diff --git a/p.png b/p.png\nindex 1..2 100644\nBinary files a/p.png and b/p.png differ\n",
            "binary",
        ),
        ("diff --git a/p.png b/p.png\nindex 1..2 100644\nGIT binary patch\nliteral 3\nabc\n", "binary"),
    ],
)
def test_refusals_are_one_line(diff: str, message: str) -> None:
    with pytest.raises(TaskError) as caught:
        apply_patch(BASE, diff)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_patch_that_was_applied_already_is_refused() -> None:
    with pytest.raises(TaskError, match="does not apply"):
        apply_patch(apply_patch(BASE, CHANGE), CHANGE)


lines = st.lists(st.sampled_from(["a", "b", "", "  c", "\td", "é"]), max_size=12)


@settings(max_examples=60)
@given(lines, lines)
def test_what_difflib_writes_applies_both_ways(one: list[str], two: list[str]) -> None:
    before = {"m.txt": FileEntry(content="".join(line + "\n" for line in one).encode())}
    after = {"m.txt": FileEntry(content="".join(line + "\n" for line in two).encode())}
    diff = unified(before, after)
    # Those diffs are for people: they show a last newline as an empty line.
    if not diff or not one or not two:
        return
    shown = {"m.txt": FileEntry(content=before["m.txt"].content + b"\n")}
    want = {"m.txt": FileEntry(content=after["m.txt"].content + b"\n")}
    assert apply_patch(shown, diff) == want
    assert apply_patch(want, diff, reverse=True) == shown


@pytest.mark.slow
def test_agrees_with_git(tmp_path: Path) -> None:
    """On diffs that git itself made."""

    def git(*words: str) -> str:
        name = ("-c", "user.name=t", "-c", "user.email=t@localhost")
        run = subprocess.run(["git", *name, *words], cwd=tmp_path, capture_output=True, text=True, check=True)
        return run.stdout

    git("init", "-q")
    before = {
        "keep.txt": b"".join(b"line %d\n" % n for n in range(60)),
        "end.txt": b"no newline",
        "move/me.txt": b"".join(b"m %d\n" % n for n in range(20)),
        "gone.txt": b"g\n",
        "é ü.txt": b"1\n2\n",
    }
    for name, content in before.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    git("add", "-A")
    git("commit", "-qm", "base")
    base = {name: FileEntry(content=content) for name, content in before.items()}
    keep = before["keep.txt"].replace(b"line 3\n", b"LINE\n").replace(b"line 50\n", b"")
    (tmp_path / "keep.txt").write_bytes(keep)
    (tmp_path / "end.txt").write_bytes(b"no newline\nmore")
    (tmp_path / "move/me.txt").rename(tmp_path / "moved.txt")
    (tmp_path / "gone.txt").unlink()
    (tmp_path / "é ü.txt").write_bytes(b"1\nzwei\n")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "run.sh").write_bytes(b"echo\n")
    (tmp_path / "run.sh").chmod(0o755)
    git("add", "-A")
    want = {
        name: FileEntry(content=(tmp_path / name).read_bytes(), executable=name == "run.sh")
        for name in ("keep.txt", "end.txt", "moved.txt", "é ü.txt", "empty.txt", "run.sh")
    }
    diff = git("diff", "--cached", "-M")
    assert apply_patch(base, diff) == want
    assert apply_patch(want, diff, reverse=True) == base
