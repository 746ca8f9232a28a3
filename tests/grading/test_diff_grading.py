from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from insitu.grading.diff import DiffPolicy, apply, changes, compare, unified
from insitu.types import FileEntry


def file(text: str | bytes = "", executable: bool = False) -> FileEntry:
    return FileEntry(content=text.encode() if isinstance(text, str) else text, executable=executable)


BASE = {
    "app.py": file("x = 1\n"),
    "tests/test_app.py": file("assert x\n"),
    "pkg/conftest.py": file("real\n"),
    "data/in.bin": file(b"\0\1"),
}
POLICY = DiffPolicy(protected=("tests/*",), max_files=3, max_file_bytes=100, max_total_bytes=150)


def test_added_changed_and_deleted_are_told_apart() -> None:
    after = {**BASE, "app.py": file("x = 2\n"), "new/mod.py": file("y\n")}
    del after["data/in.bin"]
    diff = compare(BASE, after, POLICY)
    assert diff.refused == ""
    assert sorted(diff.changed) == ["app.py", "new/mod.py"]
    assert diff.added == ("new/mod.py",)
    assert diff.deleted == ("data/in.bin",)
    assert apply(BASE, diff) == after


def test_equal_trees_give_an_empty_diff_and_a_stable_hash() -> None:
    diff = compare(BASE, dict(reversed(BASE.items())), POLICY)
    assert diff.empty
    assert diff.digest == compare({}, {}, POLICY).digest


@pytest.mark.parametrize(
    "path",
    [
        "conftest.py", "a/b/conftest.py", "pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml", "x.pth",
        "sitecustomize.py", "sub/usercustomize.py", "sitecustomize/__init__.py", ".git/config",
        "pytest.toml", "sub/.pytest.toml", "jest.config.mjs", "web/vitest.config.ts", ".mocharc.json",
        ".npmrc", "go.work", ".cargo/config.toml", "crate/.cargo/config", ".config/nextest.toml",
        "sub/.git/hooks/post-commit", ".gitattributes", ".gitmodules", "tests/test_new.py", "tests/deep/x.py",
    ],
)  # fmt: skip
def test_protected_paths_are_dropped_and_recorded(path: str) -> None:
    diff = compare(BASE, {**BASE, path: file(b"\0evil")}, POLICY)
    assert diff.refused == ""
    assert diff.dropped == (path,)
    assert diff.empty


def test_edits_and_deletions_of_protected_files_are_undone() -> None:
    after = {**BASE, "tests/test_app.py": file("pass\n")}
    del after["pkg/conftest.py"]
    diff = compare(BASE, after, POLICY)
    assert diff.dropped == ("pkg/conftest.py", "tests/test_app.py")
    assert apply(BASE, diff) == BASE


def test_a_file_cannot_take_the_place_of_a_folder_with_protected_files() -> None:
    after = {path: entry for path, entry in BASE.items() if not path.startswith("tests/")}
    diff = compare(BASE, {**after, "tests": file("hm\n")}, POLICY)
    assert diff.refused == ""
    assert apply(BASE, diff) == BASE
    assert diff.dropped == ("tests", "tests/test_app.py")


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/etc/passwd", "not relative"), ("", "not relative"), ("../up.py", "normal form"),
        ("a/../b.py", "normal form"), ("./a.py", "normal form"), ("a//b.py", "normal form"),
        ("a/", "normal form"), ("app.py/inner.py", "under a file"),
    ],
)  # fmt: skip
def test_bad_paths_refuse_the_whole_diff(path: str, why: str) -> None:
    diff = compare(BASE, {**BASE, path: file("x\n"), "app.py": file("x = 2\n")}, POLICY)
    assert why in diff.refused
    assert diff.empty
    assert diff.refused.isprintable()


def test_a_file_over_a_folder_of_the_base_is_refused() -> None:
    assert "both a file and a folder" in compare(BASE, {**BASE, "data": file("x\n")}, POLICY).refused


@pytest.mark.parametrize(
    "path",
    ["a\0b", "a\nb", "\x1b[2J", "n" * 201, "\U0001f600" * 60, "d/" * 300 + "f", "\udcff.py"],
    ids=["nul", "line", "escape", "long name", "long in bytes", "long path", "not UTF-8"],
)
def test_names_that_no_sandbox_is_given_are_left_out_and_recorded(path: str) -> None:
    diff = compare(BASE, {**BASE, path: file("x\n"), "app.py": file("x = 2\n")}, POLICY)
    assert diff.refused == ""
    assert sorted(diff.changed) == ["app.py"]
    assert len(diff.left_out) == 1
    assert diff.left_out[0].isprintable()


@pytest.mark.parametrize(
    ("leftovers", "left_out"),
    [
        ({"lib.so": file(b"\x7fELF\0")}, ("lib.so",)),
        ({"notes.txt": file(b"caf\xe9")}, ("notes.txt",)),
        ({"big.txt": file("x" * 101)}, ("big.txt",)),
        ({"a": file("x" * 90), "b": file("x" * 80)}, ("a",)),
        ({"data/in.bin": file(b"\0\2")}, ("data/in.bin",)),
        ({f"zz/{n}.log": file() for n in range(4)}, tuple(f"zz/{n}.log" for n in range(4))),
        ({f"aa/b/{n}.log": file("x" * 30) for n in range(5)}, tuple(f"aa/b/{n}.log" for n in range(5))),
        ({"node_modules/m/i.js": file("x" * 99), "b": file("x" * 80)}, ("node_modules/m/i.js",)),
        ({f"w/venv/{n}.py": file() for n in range(9)}, tuple(f"w/venv/{n}.py" for n in range(9))),
        ({f"{n}": file() for n in range(4)}, ("0", "1", "2")),
    ],
    ids=[
        "library",
        "Latin-1",
        "large",
        "much",
        "a binary of the base",
        "many",
        "many deep",
        "modules",
        "an environment",
        "many loose",
    ],
)
def test_what_work_leaves_behind_is_left_out_and_recorded(
    leftovers: dict[str, FileEntry], left_out: tuple[str, ...]
) -> None:
    """And what was solved beside it stays, though it is new too."""
    solved = {"app.py": file("x = 2\n"), "pkg/new.py": file("y\n")}
    diff = compare(BASE, {**BASE, **solved, **leftovers}, POLICY)
    assert diff.refused == ""
    assert diff.left_out == left_out
    assert solved.items() <= dict(diff.changed).items()
    kept = {path: entry for path, entry in leftovers.items() if path not in left_out}
    assert apply(BASE, diff) == {**BASE, **solved, **kept}


@pytest.mark.parametrize(
    ("after", "why"),
    [
        ({"app.py": file(b"x\0")}, "NUL"),
        ({"app.py": file(b"caf\xe9")}, "not UTF-8"),
        ({"app.py": file("x" * 101)}, "101 bytes"),
    ],
)
def test_files_of_the_base_that_became_something_else_are_refused(
    after: dict[str, FileEntry], why: str
) -> None:
    diff = compare(BASE, {**BASE, **after}, POLICY)
    assert why in diff.refused
    assert not diff.changed


@pytest.mark.parametrize(
    ("before", "after", "judged"),
    [
        (b"# caf\xe9\nx = 1\n", b"# caf\xe9\nx = 2\n", True),
        (b"# caf\xe9\n", "# café\n".encode(), True),
        (b"\x93\xfa\x96\x7b\n", b"\x93\xfa\x96\x7b\x8c\xea\n", True),
        (b"caf\xe9\n", b"caf\xe9\0", False),
        (b"\x7fELF\x01\xff", b"\x7fELF\x01\xfe", False),
        (b"text\xff\n", b"\x01\x02\xff\n", False),
    ],
    ids=["Latin-1", "to UTF-8", "Shift JIS", "to NUL", "binary", "to binary"],
)
def test_a_source_of_the_base_in_another_encoding_may_be_changed(
    before: bytes, after: bytes, judged: bool
) -> None:
    base = {**BASE, "old.py": file(before)}
    diff = compare(base, {**base, "old.py": file(after)}, POLICY)
    assert diff.refused == ""
    assert (dict(diff.changed), diff.left_out) == (
        ({"old.py": file(after)}, ()) if judged else ({}, ("old.py",))
    )


def test_over_the_caps_leftovers_go_before_a_solution_that_is_larger() -> None:
    solved = {f"lib/{n}.py": file("x" * 40) for n in range(3)}
    diff = compare(BASE, {**BASE, **solved, "target/o.txt": file("x" * 20), "notes": file("x" * 30)}, POLICY)
    assert (diff.refused, diff.left_out) == ("", ("notes", "target/o.txt"))
    assert dict(diff.changed) == solved


def test_source_over_the_caps_is_refused_and_never_half_left_out() -> None:
    solved = {f"lib/{n}.py": file("y\n") for n in range(4)}
    diff = compare(BASE, {**BASE, **solved, "notes.log": file("x")}, POLICY)
    assert diff.refused == "4 files were changed, more than 3 can be judged"
    assert diff.left_out == ("notes.log",)


def test_what_the_base_s_own_gitignore_names_goes_first_over_the_caps() -> None:
    base = {
        **BASE,
        ".gitignore": file("# made\n/out/\n*.gen.py\n!keep.gen.py\n"),
        "sub/.gitignore": file("tmp\n"),
    }
    made = ("a.gen.py", "out/b.py", "sub/tmp/c.py")
    kept = {"keep.gen.py": file("y\n"), "sub/out/d.py": file("y\n"), "tmp.py": file("y\n")}
    after = {**base, **dict.fromkeys(made, file("x\n")), **kept}
    diff = compare(base, after, POLICY)
    assert (diff.refused, diff.left_out) == ("", made)
    assert dict(diff.changed) == kept
    planted = {**BASE, ".gitignore": file("*.py\n"), "1.py": file(), "2.py": file(), "3.py": file()}
    assert "4 files" not in compare(BASE, planted, POLICY).refused, "the agent's own names nothing"
    assert compare(BASE, planted, POLICY).left_out == (".gitignore",)


def test_a_tools_folder_of_the_base_that_is_gone_is_put_back() -> None:
    """It may have been too large to be read; one that was read may lose files."""
    base = {**BASE, "build/a.c": file(), "x/venv/b.py": file(), "x/venv/c.py": file()}
    solved = {**BASE, "app.py": file("x = 2\n"), "x/venv/b.py": file()}
    diff = compare(base, solved, POLICY)
    assert diff.deleted == ("x/venv/c.py",)
    assert diff.dropped == ("build/a.c",)
    assert apply(base, diff) == {**solved, "build/a.c": file()}


def test_too_much_of_the_base_changed_is_refused() -> None:
    base = {str(n): file() for n in range(4)}
    assert "4 files were changed" in compare(base, {path: file("x") for path in base}, POLICY).refused
    assert (
        "160 bytes were changed" in compare(base, {"0": file("x" * 80), "1": file("x" * 80)}, POLICY).refused
    )


def test_compiled_caches_are_ignored_not_refused() -> None:
    after = {**BASE, "__pycache__/app.cpython-311.pyc": file(b"\0\1"), "old.pyc": file(b"\0")}
    diff = compare(BASE, after, POLICY)
    assert diff.empty
    assert diff.refused == ""
    assert diff.ignored == ("__pycache__/app.cpython-311.pyc", "old.pyc")


def test_new_names_of_the_standard_library_are_noted_and_kept() -> None:
    after = {**BASE, "json.py": file("x\n"), "random/__init__.py": file("x\n"), "jsonish.py": file("x\n")}
    diff = compare(BASE, after, POLICY)
    assert diff.suspicious == ("json.py", "random/__init__.py")
    assert "json.py" in diff.changed


def test_the_digest_tells_every_difference_apart() -> None:
    trees = [
        BASE,
        {**BASE, "app.py": file("x = 2\n")},
        {**BASE, "app.py": file("x = 1\n", executable=True)},
        {**BASE, "app.pyx": file("x = 2\n")},
        {path: entry for path, entry in BASE.items() if path != "app.py"},
        {path: entry for path, entry in BASE.items() if path != "data/in.bin"},
    ]
    assert len({compare(BASE, tree, POLICY).digest for tree in trees}) == len(trees)


TREES = st.dictionaries(
    st.sampled_from(
        ["a.py", "b.py", "c/d.py", "c", "conftest.py", "tests/t.py", ".git/HEAD", "x.pyc", "../u"]
    ),
    st.builds(file, st.sampled_from(["", "1\n", "2\n"]), st.booleans()),
)


@given(base=TREES, after=TREES)
def test_any_diff_is_refused_or_gives_a_tree_that_can_be_laid_out(
    base: dict[str, FileEntry], after: dict[str, FileEntry]
) -> None:
    base.pop("../u", None)
    if "c" in base:
        base.pop("c/d.py", None)
    diff = compare(base, after, POLICY)
    tree = apply(base, diff)
    assert not any(other.startswith(path + "/") for path in tree for other in tree)
    for path in ("conftest.py", "tests/t.py", ".git/HEAD"):
        assert tree.get(path) == base.get(path)
    assert "../u" not in tree
    if not (diff.refused or diff.dropped or diff.ignored or diff.left_out):
        assert tree == after


def test_changes_reports_everything_unfiltered() -> None:
    changed, deleted = changes({"a": file("1"), "b": file("2")}, {"a": file("3"), ".git/x": file("y")})
    assert sorted(changed) == [".git/x", "a"]
    assert deleted == ("b",)


def test_the_text_diff_is_for_people() -> None:
    text = unified(BASE, {**BASE, "app.py": file("x = 1\ny = '\x1b[31m'\n"), "b.bin": file(b"\0")})
    assert "--- a/app.py" in text
    assert "+y = '\\x1b[31m'" in text
    assert "b.bin: binary" in text
    assert "\x1b" not in text
    assert unified(BASE, BASE) == ""


def test_line_ends_are_said_once_and_hide_no_change() -> None:
    """A file of CRLF: its ends kept, changed in a hunk, changed in all of it; one of mixed ends."""
    crlf = "".join(f"line {n}\r\n" for n in range(900)).encode()
    kept, hunk = (crlf.replace(b"line 5\r\n", new) for new in (b"other\r\n", b"other\n"))
    change = ["--- a/t", "+++ b/t", "-line 5", "+other"]

    def shown(before: bytes, after: bytes) -> list[str]:
        lines = unified({"t": file(before)}, {"t": file(after)}).splitlines()
        return [line for line in lines if line[0] in "+-\\"]

    said = "\\ line ends changed: CRLF, now "
    assert shown(crlf, kept) == change
    assert shown(crlf, hunk) == [*change[:2], f"{said}CRLF and LF", *change[2:]]
    assert shown(crlf, crlf.replace(b"\r", b"")) == [*change[:2], f"{said}LF"]
    assert shown(b"a\r\nb\n", b"a\nb\r\n") == [*change[:2], "-a\\r", "-b", "+a", "+b\\r"]


def test_the_text_diff_is_bounded() -> None:
    text = unified({}, {"a": file("line\n" * 10_000)}, max_chars=500)
    assert len(text) < 600
    assert text.endswith("... (cut)\n")
