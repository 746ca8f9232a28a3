"""One row in the shape of each set, written by us: names, repositories and patches are made up."""

from __future__ import annotations

import json
from typing import Any

GOLD = """\
diff --git a/pkg/core.py b/pkg/core.py
--- a/pkg/core.py
+++ b/pkg/core.py
@@ -1,2 +1,2 @@
 def one():
-    return 2
+    return 1
"""
TESTS = """\
diff --git a/tests/test_core.py b/tests/test_core.py
--- a/tests/test_core.py
+++ b/tests/test_core.py
@@ -1 +1,4 @@
 from pkg.core import one
+
+def test_one():
+    assert one() == 1
diff --git a/tests/data/table.json b/tests/data/table.json
new file mode 100644
--- /dev/null
+++ b/tests/data/table.json
@@ -0,0 +1 @@
+[]
"""
F2P, P2P = ["tests/test_core.py::test_one"], ["tests/test_core.py::test_two[a b]"]
ISSUE = "one() gives 2"
SECRETS = ("return 1", "test_one", "test_two")
"""What of a row may never reach an agent."""


def swe(**more: Any) -> dict[str, Any]:
    return {
        "repo": "pallets/flask",
        "instance_id": "pallets__flask-1",
        "base_commit": "0123456789abcdef0123456789abcdef01234567",
        "patch": GOLD,
        "test_patch": TESTS,
        "problem_statement": ISSUE,
        "hints_text": "have a look at return 1",
        "created_at": "2023-01-01T00:00:00Z",
        "version": "2.0",
        "FAIL_TO_PASS": json.dumps(F2P),
        "PASS_TO_PASS": json.dumps(P2P),
        "environment_setup_commit": "0123456789abcdef0123456789abcdef01234567",
        "difficulty": "<15 min fix",
    } | more


def live(**more: Any) -> dict[str, Any]:
    more = {"test_cmds": ["pytest -rA tests"], "log_parser": "pytest"} | more
    return swe(repo="some/thing", instance_id="some__thing-7", FAIL_TO_PASS=F2P, PASS_TO_PASS=P2P, **more)


def gym(**more: Any) -> dict[str, Any]:
    return swe(repo="getmoto/moto", instance_id="getmoto__moto-42", FAIL_TO_PASS=F2P, PASS_TO_PASS=P2P) | more


def rebench(**more: Any) -> dict[str, Any]:
    install = {"test_cmd": "pytest -rA tests", "log_parser": "parse_log_pytest", "docker_specs": {"x": 1}}
    return (
        live(image="registry.example/some:thing", test_cmds=None, log_parser="", install_config=install)
        | more
    )


def pro(**more: Any) -> dict[str, Any]:
    row = swe(
        repo="Some/Thing",
        instance_id="instance_some__thing-abc-vdef",
        fail_to_pass=str(F2P),
        pass_to_pass=str(P2P),
    )
    del row["FAIL_TO_PASS"], row["PASS_TO_PASS"]
    base = row["base_commit"]
    return (
        row
        | {
            "before_repo_set_cmd": f"git reset --hard {base}\ngit clean -fd\ngit checkout fedcba -- tests",
            "selected_test_files_to_run": "['tests/test_core.py']",
            "run_script": "pytest -rA $1\n",
            "parser_script": "import sys\n",
        }
        | more
    )


def smith(**more: Any) -> dict[str, Any]:
    return {
        "instance_id": "some__thing.0123abcd.lm_rewrite__x1",
        "patch": GOLD,
        "FAIL_TO_PASS": F2P,
        "PASS_TO_PASS": P2P,
        "image_name": "swebench/swesmith.x86_64.some_1776_thing.0123abcd",
        "repo": "swesmith/some__thing.0123abcd",
        "problem_statement": ISSUE,
    } | more


def r2e(**more: Any) -> dict[str, Any]:
    diff = {"header": {"file": {"path": "pkg/core.py"}}, "new_file_content": "def one():\n    return 1\n"}
    return {
        "repo_name": "thing",
        "docker_image": "namanjain12/thing_final:abc123",
        "commit_hash": "abc123",
        "problem_statement": ISSUE,
        "parsed_commit_content": json.dumps({"file_diffs": [diff]}),
        "execution_result_content": json.dumps(
            {"test_file_names": ["test_1.py"], "test_file_codes": ["def test_one(): pass\n"]}
        ),
        "expected_output_json": json.dumps({"test_one": "PASSED", "TestA.test_old": "FAILED"}),
    } | more


def slime(**more: Any) -> dict[str, Any]:
    meta = {
        "instance_id": "thing-1",
        "image": "registry.example/thing:1",
        "workdir": "/workspace/thing",
        "problem_statement": ISSUE,
        "pre_commands": ["git checkout -f 0123456"],
        "golden_patch": GOLD,
        "eval_cmd": "pytest tests -k test_one",
    }
    return {"prompt": [{"role": "user", "content": "x"}], "label": "thing", "metadata": meta | more}


def slime_nested(**more: Any) -> dict[str, Any]:
    remote = {
        "instance_id": "thing-2",
        "image_url": "registry.example/thing:2",
        "workdir": "/repo",
        "pre_commands": "cd /repo\\ngit checkout -f 0123456",
        "f2p_script": "import sys, pytest\nsys.exit(pytest.main(['-k', 'test_one']))\n",
    }
    prompt = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": ISSUE}]},
    ]
    return {"prompt": prompt, "metadata": {"remote_env_info": remote | more}}


def slime_pro(**more: Any) -> dict[str, Any]:
    swepro = {
        "run_script_path": "a/run.sh",
        "parser_script_path": "a/parser.py",
        "fail_to_pass": F2P,
        "pass_to_pass": P2P,
        "selected_test_files": ["tests/test_core.py"],
        "before_repo_set_cmd": "git checkout -f 0123456\ngit checkout 89abcde -- tests",
    }
    return slime(swepro=swepro | more)


def terminus(**more: Any) -> dict[str, Any]:
    return {
        "id": "words",
        "prompt": "Write the number of words of in.txt to out.txt.",
        "setup": ["printf 'a b c' > in.txt"],
        "verify": ["test -f out.txt", 'grep -q "^3$" out.txt'],
        "max_turns": 6,
        "max_steps": 9,
        "max_completion_length": 256,
        "sandbox_timeout": 45.0,
        "num_generations": 8,
        "solution": ["wc -w < in.txt | tr -d ' ' > out.txt"],
    } | more
