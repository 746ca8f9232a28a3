# ruff: noqa: E501
"""Every source joined with the runner that judges it: data laid out as the set's own authors lay it out is
loaded, held against its runner, and validated for real in local sandboxes: the base fails and the gold passes.

Images cannot be had here: the work folder that an image would bring is put in its place, with a small
stand-in for the image's pytest. Whatever else the loader made of a row is used as it is.
"""

from __future__ import annotations

import ast
import base64
import gzip
import json
import pickle
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import swe_rows as rows

from insitu.config import load_config
from insitu.grading.grader import GradeConfig, Grader
from insitu.grading.runners.find import runner_for
from insitu.registry import shipped
from insitu.sandbox.local import LocalBackend
from insitu.tasks.base import Item
from insitu.tasks.factory import open_rows
from insitu.types import WORKDIR, FileEntry, Limits, Setup, Task, Tree, task_hash
from insitu_tasksets import function_sets
from insitu_tasksets.validate import with_gold

pytestmark = pytest.mark.slow

STAND_IN = """\
import importlib.util, pathlib, re, sys


def main(args=None):
    args = list(sys.argv[1:] if args is None else args)
    word = args[args.index("-k") + 1] if "-k" in args else ""
    paths = [p for a in args for p in [pathlib.Path(a)] if p.exists()] or [pathlib.Path(".")]
    files = [f for p in paths for f in (sorted(p.rglob("test_*.py")) if p.is_dir() else [p])]
    sys.path.insert(0, "")
    failed = passed = 0
    for file in files:
        spec = importlib.util.spec_from_file_location(file.stem, file)
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            print(f"ERROR {file} - {error}")
            failed += 1
            continue
        for name, test in vars(module).items():
            if name.startswith("test_") and word in name:
                try:
                    test()
                except Exception as error:
                    failed += 1
                    print(f"FAILED {file}::{name} - {error}")
                else:
                    passed += 1
                    print(f"PASSED {file}::{name}")
    print(f"==== {passed} passed, {failed} failed ====")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
"""
BASE_TEST, NEW_TESTS = "from pkg.core import one\n", "tests/test_core.py"
TEST_PATCH = """\
diff --git a/tests/test_core.py b/tests/test_core.py
--- a/tests/test_core.py
+++ b/tests/test_core.py
@@ -1 +1,7 @@
 from pkg.core import one
+
+def test_one():
+    assert one() == 1
+
+def test_int():
+    assert type(one()) is int
"""
FULL_TEST = "".join(
    line[1:] + "\n" for line in TEST_PATCH.splitlines() if line[0] in " +" and not line.startswith("+++")
)
F2P, P2P = [f"{NEW_TESTS}::test_one"], [f"{NEW_TESTS}::test_int"]
SWE: dict[str, Any] = {
    "test_patch": TEST_PATCH,
    "FAIL_TO_PASS": json.dumps(F2P),
    "PASS_TO_PASS": json.dumps(P2P),
}
PRO_PARSER = """\
import json, sys
tests = [l.split()[:2] for l in open(sys.argv[1]) if l.startswith(("PASSED", "FAILED"))]
json.dump({"tests": [{"name": n, "status": s} for s, n in tests]}, open(sys.argv[3], "w"))
"""


def entry(text: str, executable: bool = False) -> FileEntry:
    return FileEntry(content=text.encode(), executable=executable)


REPOSITORY: Tree = {
    "pkg/__init__.py": entry(""),
    "pkg/core.py": entry("def one():\n    return 2\n"),
    NEW_TESTS: entry(BASE_TEST),
    "pytest.py": entry(STAND_IN),
    "bin/pytest": entry('#!/bin/sh\nexec python3 -m pytest "$@"\n', True),
    "bin/python": entry('#!/bin/sh\nexec python3 "$@"\n', True),
}
"""What an image of the SWE sets has in its work folder."""


def jsonl(folder: Path, *given: Mapping[str, Any]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in given))
    return path


def lay(folder: Path, texts: Mapping[str, str]) -> Path:
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def plain(folder: Path) -> Path:
    row = {"id": "cases", "prompt": "Fix f.", "files": {"m.py": "def f(x):\n    return x\n"}}
    gold = {"gold": {"m.py": "def f(x):\n    return x + 1\n"}}
    test = "from m import f\n\ndef test_f():\n    assert f(1) == 2\n"
    return jsonl(
        folder,
        row | gold | {"entry": "m.py", "cases": [{"function": "f", "args": [1], "expected": 2}]},
        row | gold | {"id": "tests", "prompt": "2", "tests": {"tests/test_m.py": test},
                      "fail_to_pass": ["tests/test_m.py::test_f"]},
        row | gold | {"id": "checks", "prompt": "3",
                      "checks": [{"command": "python3 -c 'from m import f; print(f(1))'", "markers": ["2"]}]},
    )  # fmt: skip


def plain_folder(folder: Path) -> Path:
    return lay(
        folder / "one",
        {
            "task.toml": 'fail_to_pass = ["tests/test_m.py::test_f"]\n',
            "prompt.md": "Fix m.\n",
            "files/m.py": "def f(): return 0\n",
            "tests/tests/test_m.py": "from m import f\ndef test_f(): assert f() == 1\n",
            "gold/m.py": "def f(): return 1\n",
        },
    ).parent


def humaneval(folder: Path) -> Path:
    row = {
        "task_id": "Made/0",
        "prompt": 'def triple(x: int) -> int:\n    """ Three times x. """\n',
        "entry_point": "triple",
        "canonical_solution": "    return 3 * x\n",
        "test": "\n\nMETADATA = {'author': 'us'}\n\n\ndef check(candidate):\n    assert candidate(2) == 6\n",
    }
    loop = "def check(candidate):\n    for i in range(1, 5):\n        assert candidate(i) == 3 * i\n"
    path = folder / "HumanEval.jsonl.gz"
    text = (
        json.dumps(row)
        + "\n"
        + json.dumps(row | {"task_id": "Made/1", "prompt": row["prompt"] + "    # 1\n", "test": loop})
    )
    path.write_bytes(gzip.compress(text.encode()))
    return path


def unit_tests(folder: Path) -> Path:
    code = "from solution import double\n\ndef test_one():\n    assert double(1) == 2\n"
    return jsonl(folder, {"id": "u", "prompt": "Write double.", "test_code": code,
                          "solution": "def double(x):\n    return 2 * x\n"})  # fmt: skip


def swe_bench(folder: Path) -> Path:
    return jsonl(folder, rows.swe(**SWE))


def swe_folders(folder: Path) -> Path:
    row = rows.swe(**SWE)
    tests = {"FAIL_TO_PASS": F2P, "PASS_TO_PASS": P2P}
    keys = {key: row[key] for key in ("repo", "base_commit", "version")}
    lay(
        folder / "tasks" / row["instance_id"],
        {
            "task.yaml": json.dumps(keys),
            "tests.json": json.dumps(tests),
            "problem_statement.md": rows.ISSUE,
            "patch.diff": rows.GOLD,
            "test_patch.diff": TEST_PATCH,
        },
    )
    return folder


def live(folder: Path) -> Path:
    return jsonl(
        folder, rows.swe(**SWE, repo="some/thing", test_cmds=["pytest -rA tests"], log_parser="pytest")
    )


def gym(folder: Path) -> Path:
    return jsonl(folder, rows.gym(test_patch=TEST_PATCH, FAIL_TO_PASS=F2P, PASS_TO_PASS=P2P))


def rebench(folder: Path) -> Path:
    """Version 2, and version 1 with its set-up as text and no parser."""
    first = {
        "python": "3.9",
        "install": "pip install -e .",
        "test_cmd": "pytest --no-header -rA",
        "log_parser": None,
    }
    second = {"test_cmd": ["pytest -rA tests"], "log_parser": "parse_log_pytest", "docker_specs": {"x": 1}}
    common = {"repo": "some/thing", "log_parser": None} | SWE
    return jsonl(
        folder,
        rows.swe(
            **common, instance_id="some__thing-2", image_name="registry.example/a:2", install_config=second
        ),
        rows.swe(
            **common, instance_id="some__thing-1", problem_statement="v1", install_config=json.dumps(first)
        ),
    )


def pro(folder: Path) -> Path:
    row = rows.pro(test_patch=TEST_PATCH, run_script="pytest -rA $1\n", parser_script=PRO_PARSER)
    return jsonl(folder, row | {"fail_to_pass": str(F2P), "pass_to_pass": str(P2P)})


def smith(folder: Path) -> Path:
    bug = rows.GOLD.replace("-    return 2\n+    return 1", "-    return 1\n+    return 2")
    return jsonl(folder, rows.smith(patch=bug, FAIL_TO_PASS=F2P, PASS_TO_PASS=P2P))


def r2e(folder: Path) -> Path:
    code = "from pkg.core import one\n\ndef test_one():\n    assert one() == 1\n"
    content = {"test_file_names": ["test_1.py"], "test_file_codes": [code]}
    expected = json.dumps({"test_one": "PASSED"})
    return jsonl(
        folder, rows.r2e(execution_result_content=json.dumps(content), expected_output_json=expected)
    )


def slime(folder: Path) -> Path:
    return jsonl(folder, rows.slime(), rows.slime_nested(golden_patch=rows.GOLD))


def terminus(folder: Path) -> Path:
    return jsonl(folder, rows.terminus())


HARBOR_TEST = """\
#!/bin/bash
python3 /tests/check.py && reward=1 || reward=0
echo "$reward" > /logs/verifier/reward.txt
"""


HARBOR_PYTHON = """\
#!/usr/bin/env python3
import json, pathlib
out = pathlib.Path("out.txt")
right = out.is_file() and out.read_text().strip() == "3"
pathlib.Path("/logs/verifier/reward.json").write_text(json.dumps({"reward": float(right)}))
"""


def harbor(folder: Path) -> Path:
    lay(
        folder / "words",
        {
            "task.toml": 'version = "1.0"\n[agent]\ntimeout_sec = 60.0\n[verifier]\ntimeout_sec = 60.0\n'
            'env = { WANT = "3" }\n[environment]\ncpus = 1\n[solution.env]\nANSWER = "3"\n',
            "instruction.md": "Write 3 to out.txt.\n",
            "environment/Dockerfile": "FROM debian:bookworm\nWORKDIR /work\n",
            "tests/test.sh": HARBOR_TEST,
            "tests/check.py": "import os\nassert open('out.txt').read().strip() == os.environ['WANT']\n",
            "solution/solve.sh": "#!/bin/bash\necho $ANSWER > out.txt\n",
        },
    )
    lay(
        folder / "digits",
        {
            "task.toml": 'version = "1.0"\n[metadata]\nauthor_name = "x"\n[verifier]\ntimeout_sec = 60.0\n',
            "instruction.md": "Write 3 to out.txt, again.\n",
            "environment/Dockerfile": "FROM debian:bookworm\n",
            "tests/test.sh": HARBOR_PYTHON,
            "solution/solve.sh": "#!/usr/bin/env python3\nprint(3, file=open('out.txt', 'w'))\n",
        },
    )
    return folder


def terminal_bench(folder: Path) -> Path:
    lay(
        folder / "tasks" / "words",
        {
            "task.yaml": "instruction: Write 3 to out.txt.\nparser_name: pytest\n",
            "Dockerfile": "FROM debian:bookworm\nWORKDIR /work\n",
            "docker-compose.yaml": "services:\n  client:\n    build:\n      dockerfile: Dockerfile\n",
            "run-tests.sh": "#!/bin/bash\necho PASSED noise\npython3 $TEST_DIR/test_outputs.py\n",
            "tests/test_outputs.py": "assert open('/work/out.txt').read().strip() == '3'\n",
            "solution.sh": "#!/bin/bash\necho 3 > out.txt\n",
        },
    )
    return folder


ADD = "a, b = map(int, input().split())\nprint(a + b)\n"


def apps(folder: Path) -> Path:
    """A program, a plain function whose outputs are wrapped, methods that rely on the set's imports, with
    and without a starter, and with tuples where the outputs have lists; a solution in Python 2 comes first."""
    row = {
        "problem_id": 1,
        "question": "Add two numbers.",
        "difficulty": "introductory",
        "url": "",
        "starter_code": "",
    }
    reported = {"inputs": ["1 2\n", ["3 4"]], "outputs": ["3\n", ["7"]]}
    call = {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [[3], [7]]}
    method = "\nclass Solution:\n    def add(self, a: List[int], b: int) -> List[int]:\n        "
    counts = "class Solution:\n    def count(self, a):\n        return {**a, 2: Counter('xx')['x']}\n"
    keys = {"fn_name": "count", "inputs": [[{"1": 5}]], "outputs": [{"1": 5, "2": 2}]}
    plain_code = "def add(a, b):\n    return a + b\n"
    return jsonl(
        folder,
        row | {"input_output": json.dumps(reported), "solutions": json.dumps(["print 3", ADD])},
        row | {"problem_id": 2, "input_output": json.dumps(call), "solutions": json.dumps([plain_code])},
        row | {"problem_id": 3, "starter_code": method, "solutions": json.dumps([method + "return tuple(x + b for x in a)\n"]),
               "input_output": json.dumps(call | {"inputs": [[[1, 2], 1], [[], 1]], "outputs": [[2, 3], []]})},
        row | {"problem_id": 4, "input_output": json.dumps(keys), "solutions": json.dumps([counts])},
    )  # fmt: skip


def taco(folder: Path) -> Path:
    reported = {"inputs": ["1 2\n"], "outputs": ["3\n"]}
    row = {
        "question": "Add.",
        "starter_code": "",
        "difficulty": "EASY",
        "name": "A",
        "raw_tags": "[]",
        "source": "codeforces",
        "tags": "[]",
        "skill_types": "[]",
        "url": "",
        "Expected Auxiliary Space": None,
        "time_limit": "2.0 seconds",
        "date": "2020-01-01",
        "picture_num": "0",
        "memory_limit": "256.0 megabytes",
        "Expected Time Complexity": None,
    }
    return jsonl(folder, row | {"input_output": json.dumps(reported), "solutions": json.dumps([ADD])})


def code_contests(folder: Path) -> Path:
    tests = {"input": ["1 2\n"], "output": ["3\n"]}
    return jsonl(
        folder,
        {
            "name": "1_A. Sum", "description": "Add.", "public_tests": tests, "difficulty": 7,
            "private_tests": {"input": ["5 6\n"], "output": ["11 \n\n"]}, "generated_tests": {"input": [], "output": []},
            "solutions": {"language": [2, 1, 3], "solution": ["int main(){}", "print 3", ADD]},
            "time_limit": {"seconds": 1, "nanos": 500000000}, "memory_limit_bytes": 256000000, "source": 2,
            "incorrect_solutions": {"language": [], "solution": []}, "cf_contest_id": 1, "cf_index": "A",
            "cf_points": 0.0, "cf_rating": 800, "cf_tags": [""], "is_description_translated": False,
            "untranslated_description": "", "input_file": "", "output_file": "",
        },
    )  # fmt: skip


def live_code_bench(folder: Path) -> Path:
    public = [{"input": "1 2\n", "output": "3", "testtype": "stdin"}]
    calls = [{"input": "[1, 2]\n3", "output": "6", "testtype": "functional"}]
    packed, packed_calls = (
        base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests * 2)))).decode()
        for tests in (public, calls)
    )
    row = {"question_title": "Add", "question_content": "Add.", "platform": "atcoder", "starter_code": "",
           "difficulty": "easy", "metadata": "{}", "contest_id": "abc1", "contest_date": "2024-01-01T00:00:00"}  # fmt: skip
    method = "class Solution:\n    def add(self, items: List[int], more: int) -> int:\n        "
    return jsonl(
        folder,
        row | {"question_id": "abc1_a", "public_test_cases": json.dumps(public), "private_test_cases": packed},
        row | {"question_id": "2", "starter_code": method, "public_test_cases": json.dumps(calls),
               "private_test_cases": packed_calls, "metadata": json.dumps({"func_name": "add"})},
    )  # fmt: skip


LIVE_GOLD = {"abc1_a": ADD, "2": "return sum(items) + more\n"}
"""What a solver writes below the starter: the set has no solutions."""


def mbpp(folder: Path) -> Path:
    code = "def pair(a, b):\n    return tuple(sorted(set(a) & set(b)))\n"
    row = {"task_id": 2, "text": "Shared elements.", "code": code, "test_setup_code": "", "challenge_test_list": [],
           "test_list": ["assert pair((3, 4, 5, 6), (5, 7, 4, 10)) == (4, 5)"]}  # fmt: skip
    near = "import math\ndef half(a):\n    return a / 2\n"
    return jsonl(
        folder,
        row,
        {"task_id": 3, "prompt": "Half.", "code": near, "test_imports": ["import math"], "source_file": "x",
         "test_list": ["assert math.isclose(half(3), 1.5)", "assert half(2) == 1"]},
    )  # fmt: skip


PLUS = """\
import numpy as np

def is_floats(x) -> bool:
    return isinstance(x, float) or isinstance(x, (list, tuple)) and all(isinstance(i, float) for i in x)


def assertion(out, exp, atol):
    if atol == 0 and is_floats(exp):
        atol = 1e-6
    if atol != 0 and out != exp:
        assert np.allclose(out, exp, rtol=1e-07, atol=atol)
    else:
        assert out == exp, f"out: {out}, exp: {exp}"


"""
"""Laid out as in EvalPlus; its own functions have the hashes in function_sets.py, these are added to them."""


@pytest.fixture(autouse=True)
def _own_assertion(monkeypatch: pytest.MonkeyPatch) -> None:
    floats, equal = (node for node in ast.parse(PLUS).body if isinstance(node, ast.FunctionDef))
    for name, node in (("IS_FLOATS", floats), ("ASSERTIONS", equal)):
        known = getattr(function_sets, name)
        monkeypatch.setattr(function_sets, name, (*known, function_sets._meaning(node)))


LOOP = "for i, (inp, exp) in enumerate(zip(inputs, results)):\n"


def evalplus(folder: Path) -> Path:
    check = (
        "def check(candidate):\n    inputs = [[3], [5]]\n    results = [1.0, 1.6666666666666667]\n    " + LOOP
    )
    human = {
        "task_id": "HumanEval/0",
        "prompt": 'def third(x: int) -> float:\n    """ A third. """\n',
        "entry_point": "third",
        "canonical_solution": "    return x / 3\n",
        "test": "\n\n" + PLUS + check + "        assertion(candidate(*inp), exp, 0)\n",
    }
    code = "def double(x):\n    return 2 * x\n"
    lists = "inputs = [[3], [(1, 2)]]\nresults = [6, (1, 2, 1, 2)]\n"
    return jsonl(
        folder,
        human,
        {"task_id": 9, "code": code, "prompt": "Double it.", "source_file": "x", "test_imports": [],
         "test_list": ["assert double(1) == 2"], "test": PLUS + lists + LOOP + "    assertion(double(*inp), exp, 0)\n"},
        {"task_id": 10, "code": code, "prompt": "Double it again.", "source_file": "x", "test_imports": [],
         "test_list": ["assert double(1) == 2"],
         "test": "import numpy as np\nfrom math import inf\n\n" + PLUS + "def ref_func(x):\n    return x + x\n\n"
         "inputs = [[3], [4]]\nfor i, inp in enumerate(inputs):\n    assertion(double(*inp), ref_func(*inp), 0)\n"},
    )  # fmt: skip


NUMPY = """\
bool_ = bool

class ndarray: pass

def allclose(a, b, rtol, atol):
    return abs(a - b) <= atol + rtol * abs(b)

def isscalar(x):
    return isinstance(x, (int, float, str))
"""
"""What EvalPlus's tests use of numpy on equal values, and pytest.approx of any numpy that is imported."""


def bigcodebench(folder: Path) -> Path:
    head = 'import json\n\ndef task_func(text):\n    """\n    The number of keys.\n    """\n'
    test = (
        "import unittest\n\nclass TestCases(unittest.TestCase):\n    def test_one(self):\n"
        "        self.assertEqual(task_func('{\"a\": 1}'), 1)\n    def test_two(self):\n"
        "        self.assertEqual(task_func('{}'), 0)\n"
    )
    row = {"task_id": "BigCodeBench/0", "complete_prompt": head, "instruct_prompt": "x", "libs": "['json']",
           "canonical_solution": "    return len(json.loads(text))", "code_prompt": head, "test": test,
           "doc_struct": "{}", "entry_point": "task_func"}  # fmt: skip
    return jsonl(folder, row)


def polyglot(folder: Path) -> Path:
    config = {"authors": ["x"], "files": {"solution": ["two_fer.py"], "test": ["two_fer_test.py"],
                                          "example": [".meta/example.py"]}}  # fmt: skip
    test = (
        "import unittest\nfrom two_fer import two_fer\n\nclass TwoFerTest(unittest.TestCase):\n"
        "    def test_name(self):\n        self.assertEqual(two_fer('Bo'), 'One for Bo.')\n"
    )
    lay(
        folder / "python" / "exercises" / "practice" / "two-fer",
        {
            ".meta/config.json": json.dumps(config),
            ".meta/example.py": "def two_fer(name='you'):\n    return f'One for {name}.'\n",
            ".docs/instructions.md": "# Instructions\n\nOne for you.\n",
            "two_fer.py": "def two_fer(name):\n    pass\n",
            "two_fer_test.py": test,
        },
    )
    return folder


SOURCES: Mapping[str, Callable[[Path], Path]] = {
    "jsonl": plain,
    "folder": plain_folder,
    "humaneval": humaneval,
    "unit_tests": unit_tests,
    "swe_bench": swe_bench,
    "swe_bench_folders": swe_folders,
    "swe_bench_live": live,
    "swe_gym": gym,
    "swe_rebench": rebench,
    "swe_pro": pro,
    "swe_smith": smith,
    "r2e_gym": r2e,
    "slime": slime,
    "terminus": terminus,
    "apps": apps,
    "taco": taco,
    "code_contests": code_contests,
    "live_code_bench": live_code_bench,
    "mbpp": mbpp,
    "evalplus": evalplus,
    "bigcodebench": bigcodebench,
    "polyglot": polyglot,
    "harbor": harbor,
    "terminal_bench": terminal_bench,
}


def test_no_source_is_left_out() -> None:
    scored_by_rewards = set(shipped("rewards"))
    assert set(SOURCES) == {*shipped("tasks")} - {"toy"} - scored_by_rewards


def in_place_of_image(item: Item) -> Item:
    """The task with the image's work folder as its files, and what only an image has on the way."""
    task, oracle = item.task, item.oracle
    if task.category == "evalplus":
        return Item(task=with_files(task, {**task.files, "numpy.py": entry(NUMPY)}), oracle=oracle)
    if not task.setup.image:
        return item
    repository = task.grading.runner in ("swebench_log", "command")
    files: Tree = REPOSITORY if repository else {"notes.txt": entry("")}
    if repository and not oracle.tests.patch:
        files = {**files, NEW_TESTS: entry(FULL_TEST)}  # of these sets the image has the tests
    path = "export PATH=$PWD/bin:$PATH PYTHONPATH=$PWD\n" if repository else ""
    checks = tuple(replace(check, command=path + check.command) for check in oracle.tests.checks)
    tests = replace(oracle.tests, script=path + oracle.tests.script, checks=checks)
    return Item(task=with_files(task, files), oracle=replace(oracle, tests=tests))


def with_files(task: Task, files: Tree) -> Task:
    """The task without an image."""
    setup = Setup(workdir=WORKDIR)
    named = task_hash(task.prompt, files, task.grading, setup)
    return replace(task, files=files, setup=setup, content_hash=named)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder of its own for this file; what sandboxes are made from is copied into it once."""
    return tmp_path_factory.mktemp("cache")


# Every second one in make test-full: they take a second each.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if i % 2 else ()) for i, name in enumerate(SOURCES)]
)
async def test_a_row_as_its_set_has_it_is_judged_by_its_runner(
    name: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INSITU_CACHE", str(cache))
    data = tmp_path / "data"
    data.mkdir()
    config = load_config(None, [f"tasks.source={name}", f"tasks.path={SOURCES[name](data)}"])
    items = [in_place_of_image(item) for item in open_rows(config, Limits(wall_s=20), runner_for).every()]
    assert items
    backend = LocalBackend()
    grader = Grader(backend, GradeConfig(remember=0, timeout_s=20))
    for item in items:
        oracle = await with_gold(backend, item.task, item.oracle)
        if name == "live_code_bench":
            starter = item.task.files["solution.py"].content.decode()
            oracle = replace(oracle, gold={"solution.py": entry(starter + LIVE_GOLD[item.task.id])})
        elif not (oracle.gold or oracle.gold_patch):
            oracle = replace(oracle, gold_patch=rows.GOLD)  # nor has slime's nested row
        await grader.validate(item.task, oracle, repeats=1)
