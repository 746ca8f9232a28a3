"""Which program the text of a shell command shows."""

from __future__ import annotations

import pytest

from insitu.tasks.commands import program


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("julia --startup-file=no x.jl", "julia"),
        ("FOO=1 BAR=a/b cargo test && go vet ./...", "cargo"),
        ("cd sub/dir && pytest -q > out 2>&1", "pytest"),
        ("cd . && FLAG=1 node test.js\n", "node"),
        ("make -j$(nproc) check", "make"),
        ("python3 check.py $(cat answer.txt) 42", "python3"),
        ("pip install . && wordcount --help", "pip"),
        ("grep -q '&&' out.txt", "grep"),
        ("timeout 5 cmd", "timeout"),
        ("python3.11", "python3.11"),
        ("true", "true"),
        ("cd app && . .venv/bin/activate && pytest", "cd"),
    ],
)
def test_the_first_program_of_a_chain_is_needed(command: str, found: str) -> None:
    assert program(command) == found


@pytest.mark.parametrize(
    "command",
    [
        "pytest -q || python3 -m pytest",
        "npx test; python3 t.py",
        "nodex -v\npython3 t.py",
        "nodex -v | cat",
        "server & python3 t.py",
        "(nodex -v)||true",
        "{ nodex; }",
        "2>/dev/null python3 t.py",
        "> out tool",
        'run() { python3 "$1"; }; run a',
        "run() (python3 t.py)",
        "! tool -v",
        "./run.sh",
        "bin/tool",
        "$TOOL x",
        "$(which tool) x",
        "'my tool' x",
        "PATH=$PWD/bin:$PATH tool",
        "PATH=bin tool",
        "X=$(tool) other",
        "X=1",
        "a=(1 2) tool",
        "[ -f x ] && make",
        "[[ -f x ]] && make",
        "# a comment",
        "",
    ],
)
def test_no_program_is_named_where_the_text_leaves_doubt(command: str) -> None:
    assert program(command) == ""
