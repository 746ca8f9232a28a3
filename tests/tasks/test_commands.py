"""Which programs the text of a shell command shows."""

from __future__ import annotations

import pytest

from insitu.tasks.commands import programs


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("julia --startup-file=no x.jl", ("julia",)),
        ("FOO=1 BAR=2 cargo test && go vet ./... | tee log", ("cargo", "go", "tee")),
        ("cd . ; pytest -q > out 2>&1", ("cd", "pytest")),
        ("./run.sh && bash x", ("bash",)),
        ("echo $(julia x)", ("echo", "julia")),
        ("sh -c 'a; b c'", ("sh",)),
        ("python3 -c 'import os; print(1)'", ("python3",)),
        ("[ -f x ] && make", ("make",)),
        # Of these the text shows too little.
        ("pytest -q || python3 -m pytest", ()),
        ("PATH=$PWD/bin:$PATH tool", ()),
        ("export PATH=x; tool", ()),
        ("for x in a b; do tool $x; done", ()),
        ("cat <<EOF\ntool; other\nEOF", ()),
        ("case $1 in a) tool;; esac", ()),
        ("echo 'open", ()),
        ("", ()),
    ],
)
def test_programs(command: str, found: tuple[str, ...]) -> None:
    assert programs(command) == found
