"""Shell scripts that run the tests of a repository in a grading sandbox and mark the output to parse.

The hidden tests are written by the grader before such a script runs, so no script applies a patch. The table
of commands covers the repositories of SWE-bench and SWE-Gym, whose rows carry no command; rows of other
repositories must bring their own.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

START, END, EXIT = ">>>>> Start Test Output", ">>>>> End Test Output", ">>>>> Test Exit Code:"
ACTIVATE = (
    "if [ -f /opt/miniconda3/bin/activate ]; then . /opt/miniconda3/bin/activate; conda activate testbed; fi"
)
DATA_SUFFIXES = (
    ".json .png .csv .txt .md .jpg .jpeg .pkl .yml .yaml .toml .rst .xml .html .cfg .ini .gz .zip .npy .dat"
).split()
"""Files that a test patch brings and that are no tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _TestCommand:
    """How a repository's tests are run and read."""

    command: str
    parser: str
    style: str = "files"
    """What is appended: test files, django's dotted labels, or -k with the names of the tests."""
    env: str = ""


_RA = _TestCommand(command="pytest -rA", parser="pytest")
_QUIET = _TestCommand(command="pytest -n0 -rA", parser="pytest")
REPOSITORIES: Mapping[str, _TestCommand] = {
    "astropy/astropy": _TestCommand(
        command="pytest -rA -vv -o console_output_style=classic --tb=no", parser="pytest_v2"
    ),
    "django/django": _TestCommand(
        command="./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1",
        parser="django",
        style="labels",
        env="export LANG=en_US.UTF-8 LANGUAGE=en_US:en LC_ALL=en_US.UTF-8 PYTHONIOENCODING=utf8",
    ),
    "matplotlib/matplotlib": _TestCommand(command="pytest -rA", parser="matplotlib"),
    "mwaskom/seaborn": _TestCommand(command="pytest --no-header -rA", parser="seaborn"),
    "pallets/flask": _RA,
    "psf/requests": _TestCommand(command="pytest -rA", parser="pytest_options"),
    "pydata/xarray": _RA,
    "pylint-dev/pylint": _TestCommand(command="pytest -rA", parser="pytest_options"),
    "pytest-dev/pytest": _RA,
    "scikit-learn/scikit-learn": _TestCommand(command="pytest -rA", parser="pytest_v2"),
    "sphinx-doc/sphinx": _TestCommand(command="tox --current-env -epy39 -v --", parser="pytest_v2"),
    "sympy/sympy": _TestCommand(
        command="PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' bin/test -C --verbose",
        parser="sympy",
    ),
    "pandas-dev/pandas": _TestCommand(command="pytest -rA --tb=long", parser="pytest"),
    "python/mypy": _TestCommand(command="pytest -rA", parser="pytest", style="names"),
    "getmoto/moto": _QUIET,
    "dask/dask": _TestCommand(command="pytest -n0 -rA --color=no", parser="pytest"),
    "conan-io/conan": _QUIET,
    "modin-project/modin": _QUIET,
    "iterative/dvc": _RA,
    "project-monai/monai": _RA,
    "bokeh/bokeh": _TestCommand(command="pytest -rA -n0", parser="pytest"),
    "facebookresearch/hydra": _TestCommand(command="pytest -rA --tb=long", parser="pytest"),
    "pydantic/pydantic": _TestCommand(
        command="pytest -rA --tb=short -vv -o console_output_style=classic --no-header", parser="pytest"
    ),
}


def framed(commands: Sequence[str], *, before: Sequence[str] = ()) -> str:
    """Return a script that prints markers around the output of `commands`, and the last one's exit code."""
    return "\n".join(
        [
            "#!/bin/bash",
            "exec 2>&1",
            *before,
            f"echo '{START}'",
            *commands,
            "code=$?",
            f"echo '{END}'",
            f'echo "{EXIT} $code"',
            "",
        ]
    )


def test_files(paths: Sequence[str]) -> list[str]:
    """The paths of a test patch that are tests."""
    return [path for path in paths if not path.endswith(tuple(DATA_SUFFIXES))]


def repository_script(known: _TestCommand, paths: Sequence[str], ids: Sequence[str]) -> str:
    """Return the script for a repository of the table; `paths`: those of its test patch."""
    files = test_files(paths)
    if known.style == "labels":
        words = [_label(path) for path in files]
    elif known.style == "names":
        names = sorted({test.rsplit("::", 1)[-1] for test in ids})
        words = ["-k", " or ".join(names), *sorted({test.split("::")[0] for test in ids})]
    else:
        words = files
    command = " ".join([known.command, *map(shlex.quote, words)])
    return framed([command], before=[ACTIVATE, *([known.env] if known.env else [])])


def _label(path: str) -> str:
    return path.removesuffix(".py").removeprefix("tests/").replace("/", ".")


_HEREDOC = re.compile(r"^\s*git apply\b.*<<-?\s*'?(\w+)'?")
_CHECKOUT = re.compile(r"^\s*git checkout\s+[0-9a-f]{7,40}\b")


def without_patching(script: str) -> str:
    """Return a set's own script without its `git checkout BASE files` and `git apply <<EOF` steps.

    The grader has already written the hidden tests over the candidate's files.
    """
    kept: list[str] = []
    end = ""
    for line in script.replace("\r\n", "\n").removesuffix("\n").split("\n"):  # as a shell reads it
        if end:
            end = "" if line.strip() == end else end
            continue
        found = _HEREDOC.match(line)
        if found:
            end = found[1]
        elif not _CHECKOUT.match(line):
            kept.append(line)
    return "\n".join(kept) + "\n"


def scrubbed(*commands: str) -> tuple[str, ...]:
    """Return set-up commands that then delete the history: no later commit, branch or reflog has the fix."""
    fresh = (
        "rm -rf .git && git init -q && git add -A && "
        "git -c user.name=task -c user.email=task@localhost commit -q -m base --allow-empty"
    )
    return (*commands, f"if [ -d .git ]; then {fresh}; fi")
