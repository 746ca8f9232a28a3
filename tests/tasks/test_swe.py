"""Every SWE set: a row in its shape loads, gold stays with the oracle, rows that cannot be graded do not."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import swe_rows as rows
import yaml

from insitu.config import load_config
from insitu.errors import TaskError
from insitu.grading.runners.find import runner_for
from insitu.tasks.base import Item
from insitu.tasks.dataset import LoadOptions, RowSource
from insitu.tasks.factory import format_of, open_rows
from insitu.tasks.patch import apply_patch
from insitu.types import FileEntry, Limits
from insitu_tasksets.runners.log_parsers import PARSERS, parse_log
from insitu_tasksets.swe_script import END, EXIT, REPOSITORIES, START, framed, without_patching


def load(tmp_path: Path, name: str, *given: dict[str, Any], assets: Path | None = None) -> list[Item]:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in given))
    return list(RowSource(name, format_of(name), path, LoadOptions(assets=assets)).every())


def assets(tmp_path: Path) -> Path:
    folder = tmp_path / "assets"
    (folder / "a").mkdir(parents=True)
    (folder / "a" / "run.sh").write_text("pytest $1\n")
    (folder / "a" / "parser.py").write_text("# parser\n")
    return folder


SETS: list[tuple[str, Callable[[], dict[str, Any]], str, str]] = [
    ("swe_bench", rows.swe, "swebench/sweb.eval.x86_64.pallets_1776_flask-1:latest", "/testbed"),
    ("swe_bench_live", rows.live, "starryzhang/sweb.eval.x86_64.some_1776_thing-7:latest", "/testbed"),
    ("swe_gym", rows.gym, "xingyaoww/sweb.eval.x86_64.getmoto_s_moto-42:latest", "/testbed"),
    ("swe_rebench", rows.rebench, "registry.example/some:thing", "/thing"),
    ("swe_pro", rows.pro, "jefzda/sweap-images:some.thing-some__thing-abc-vdef", "/app"),
    ("swe_smith", rows.smith, "swebench/swesmith.x86_64.some_1776_thing.0123abcd", "/testbed"),
    ("r2e_gym", rows.r2e, "namanjain12/thing_final:abc123", "/testbed"),
    ("slime", rows.slime, "registry.example/thing:1", "/workspace/thing"),
    ("slime", rows.slime_nested, "registry.example/thing:2", "/repo"),
    ("slime", rows.slime_pro, "registry.example/thing:1", "/workspace/thing"),
]


@pytest.mark.parametrize(
    ("name", "made"), [("swe_bench", rows.swe), ("swe_smith", rows.smith), ("r2e_gym", rows.r2e)]
)
def test_a_transform_may_ask_for_a_fraction_and_another_time_for_the_checkout(
    tmp_path: Path, name: str, made: Callable[[], dict[str, Any]]
) -> None:
    (plain,) = load(tmp_path, name, made())
    assert (plain.task.grading.reward, plain.task.setup.timeout_s) == ("binary", 600.0)
    (item,) = load(tmp_path, name, made() | {"reward": "fraction", "setup_timeout_s": 90.0})
    assert (item.task.grading.reward, item.task.setup.timeout_s) == ("fraction", 90.0)
    with pytest.raises(TaskError, match="reward: Input should be 'binary' or 'fraction'"):
        load(tmp_path, name, made() | {"reward": "half"})


@pytest.mark.slow
@pytest.mark.parametrize(("name", "made", "image", "workdir"), SETS)
def test_a_row_in_the_sets_shape(
    tmp_path: Path, name: str, made: Callable[[], dict[str, Any]], image: str, workdir: str
) -> None:
    (item,) = load(tmp_path, name, made(), assets=assets(tmp_path))
    task, oracle = item.task, item.oracle
    assert (task.setup.image, task.setup.workdir) == (image, workdir)
    assert rows.ISSUE in task.prompt
    assert task.files == {}
    shown = repr(task) + task.prompt
    assert not [secret for secret in rows.SECRETS if secret in shown]
    assert "git init" in task.setup.commands[-1]
    tests = oracle.tests
    assert tests.fail_to_pass or tests.checks or tests.expected
    if task.grading.runner == "swebench_log":
        assert tests.parser
        assert START in tests.script
        assert END in tests.script
        subprocess.run(["bash", "-n", "-c", tests.script], check=True, timeout=20)


def test_every_parser_that_a_loader_names_exists(tmp_path: Path) -> None:
    named = {command.parser for command in REPOSITORIES.values()}
    for name, made, _, _ in SETS:
        (item,) = load(tmp_path, name, made(), assets=tmp_path if name != "slime" else assets(tmp_path))
        named |= {item.oracle.tests.parser} - {""}
        shutil.rmtree(tmp_path / "assets", ignore_errors=True)
    assert {"pytest", "tests_json", "r2e", "django"} <= named <= set(PARSERS)


def test_swe_bench_rows(tmp_path: Path) -> None:
    (item,) = load(tmp_path, "swe_bench", rows.swe())
    tests = item.oracle.tests
    assert tests.fail_to_pass == tuple(rows.F2P)
    assert tests.pass_to_pass == tuple(rows.P2P)
    assert tests.patch == rows.TESTS
    assert tests.parser == "pytest"
    assert "pytest -rA tests/test_core.py\n" in tests.script
    assert item.oracle.gold_patch == rows.GOLD
    assert item.task.grading.protected == ("tests/data/table.json", "tests/test_core.py")


def test_test_commands_by_repository(tmp_path: Path) -> None:
    (django,) = load(tmp_path, "swe_bench", rows.swe(repo="django/django"))
    assert (
        "runtests.py --verbosity 2 --settings=test_sqlite --parallel 1 test_core\n"
        in django.oracle.tests.script
    )
    assert django.oracle.tests.parser == "django"
    ids = ["mypy/test/testcheck.py::TypeCheckSuite::check-x.test::testA"]
    (mypy,) = load(tmp_path, "swe_gym", rows.gym(repo="python/mypy", FAIL_TO_PASS=ids, PASS_TO_PASS=[]))
    assert "pytest -rA -k testA mypy/test/testcheck.py\n" in mypy.oracle.tests.script


def test_a_rows_own_script_loses_its_patching(tmp_path: Path) -> None:
    script = (
        "cd /testbed\ngit checkout 0123456789 tests/test_core.py\n"
        "git apply -v - <<'EOF_1'\ndiff --git a/x b/x\nEOF_1\n"
        f"echo '{START}'\npytest -rA tests/test_core.py\necho '{END}'\n"
        "git checkout 0123456789 tests/test_core.py\n"
    )
    assert without_patching(script) == (
        f"cd /testbed\necho '{START}'\npytest -rA tests/test_core.py\necho '{END}'\n"
    )
    odd = "echo 'a\x0cb\u2028c'\r\necho d\n\n"
    assert without_patching(odd) == odd.replace("\r", "")
    row = rows.swe(repo="some/thing", eval_script=script, log_parser="parse_log_pytest_v2", image="i:1")
    (item,) = load(tmp_path, "swe_bench", row)
    assert item.oracle.tests.parser == "pytest_v2"
    assert "git apply" not in item.oracle.tests.script
    assert item.task.setup.image == "i:1"


@pytest.mark.slow
def test_the_markers_frame_what_the_tests_print() -> None:
    run = subprocess.run(
        ["bash", "-c", framed(["echo out; echo err >&2; (exit 3)"], before=["echo before"])],
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    assert run.stdout == f"before\n{START}\nout\nerr\n{END}\n{EXIT} 3\n"


def test_swe_rebench_rows_of_both_versions(tmp_path: Path) -> None:
    first = {"python": "3.9", "test_cmd": "pytest --no-header -rA", "log_parser": None, "packages": "x"}
    row = rows.swe(
        repo="some/thing", instance_id="some__thing-1", log_parser=None, install_config=json.dumps(first)
    )
    (item,) = load(tmp_path, "swe_rebench", row)
    assert (item.task.setup.image, item.task.setup.workdir) == (
        "swerebench/sweb.eval.x86_64.some_1776_thing-1:latest",
        "/testbed",
    )
    assert item.oracle.tests.parser == "pytest"
    assert "\npytest --no-header -rA tests/test_core.py\n" in item.oracle.tests.script
    second = {"test_cmd": ["npm test"], "log_parser": "parse_log_js_4", "docker_specs": {"node": 20}}
    (item,) = load(tmp_path, "swe_rebench", rows.rebench(log_parser=None, install_config=second))
    assert (item.oracle.tests.parser, item.task.setup.workdir) == ("js_4", "/thing")
    runner_for(item.task, item.oracle)
    (item,) = load(
        tmp_path, "swe_rebench", rows.rebench(install_config=second | {"log_parser": "parse_log_zig"})
    )
    with pytest.raises(TaskError, match="no log parser 'zig'"):
        runner_for(item.task, item.oracle)


def test_pro_sets_up_without_the_solution(tmp_path: Path) -> None:
    (item,) = load(tmp_path, "swe_pro", rows.pro())
    assert not [c for c in item.task.setup.commands if "fedcba" in c]
    assert set(item.oracle.tests.files) == {".insitu/run_script.sh", ".insitu/parser.py"}
    assert item.oracle.tests.parser == "tests_json"
    folder = tmp_path / "run_scripts" / "instance_some__thing-abc-vdef"
    folder.mkdir(parents=True)
    (folder / "run_script.sh").write_text("one\n")
    (folder / "parser.py").write_text("two\n")
    bare = rows.pro(run_script="", parser_script="")
    (item,) = load(tmp_path, "swe_pro", bare, assets=tmp_path / "run_scripts")
    assert item.oracle.tests.files[".insitu/run_script.sh"].content == b"one\n"


@pytest.mark.slow
def test_pro_prints_what_the_parser_wrote(tmp_path: Path) -> None:
    (item,) = load(tmp_path, "swe_pro", rows.pro())
    (tmp_path / ".insitu").mkdir()
    (tmp_path / ".insitu/run_script.sh").write_text("echo ran $1; echo oops >&2; exit 4\n")
    parser = "import sys\nopen(sys.argv[3], 'w').write(open(sys.argv[1]).read() + open(sys.argv[2]).read())\n"
    (tmp_path / ".insitu/parser.py").write_text(parser)
    run = subprocess.run(
        ["bash", "-c", item.oracle.tests.script], cwd=tmp_path, capture_output=True, text=True, timeout=20
    )
    assert run.stdout == f"{START}\nran tests/test_core.py\noops\n\n{END}\n{EXIT} 4\n"


def test_a_long_tag_is_cut_where_registries_cut(tmp_path: Path) -> None:
    (item,) = load(tmp_path, "swe_pro", rows.pro(instance_id="instance_" + "x" * 200))
    assert len(item.task.setup.image.partition(":")[2]) == 128


def test_the_gold_of_smith_is_the_reverse(tmp_path: Path) -> None:
    (item,) = load(tmp_path, "swe_smith", rows.smith())
    assert item.oracle.gold_reversed
    broken = {"pkg/core.py": FileEntry(content=b"def one():\n    return 1\n")}
    fixed = apply_patch(broken, item.oracle.gold_patch, reverse=item.oracle.gold_reversed)
    assert fixed["pkg/core.py"].content == b"def one():\n    return 2\n"
    assert item.task.grading.protected == ("tests/test_core.py",)
    (old,) = load(tmp_path, "swe_smith", rows.smith(image_name="some__thing.0123abcd"))
    assert old.task.setup.image == "jyangballin/some_1776_thing.0123abcd"


def test_r2e_keeps_the_whole_map(tmp_path: Path) -> None:
    (item,) = load(tmp_path, "r2e_gym", rows.r2e())
    assert item.oracle.tests.expected == (("TestA.test_old", "FAILED"), ("test_one", "PASSED"))
    assert set(item.oracle.tests.files) == {"r2e_tests/test_1.py"}
    assert item.oracle.gold["pkg/core.py"].content == b"def one():\n    return 1\n"
    assert item.task.id == "thing@abc123"
    assert "r2e_tests" in item.task.setup.commands[0]


def test_slime_rows(tmp_path: Path) -> None:
    flat, nested = load(tmp_path, "slime", rows.slime(), rows.slime_nested())
    assert flat.oracle.tests.checks[0].command == "pytest tests -k test_one"
    assert flat.oracle.gold_patch == rows.GOLD
    assert flat.task.setup.commands[0] == "git checkout -f 0123456"
    assert nested.task.id == "thing-2"
    assert nested.task.setup.commands[0] == "cd /repo\ngit checkout -f 0123456"
    assert nested.oracle.tests.checks[0].markers == (" passed",)
    (swepro,) = load(tmp_path, "slime", rows.slime_pro(), assets=assets(tmp_path))
    assert swepro.oracle.tests.files[".insitu/run_script.sh"].content == b"pytest $1\n"
    # The line that brings the hidden tests in is not run.
    assert swepro.task.setup.commands[:2] == ("git checkout -f 0123456",) * 2


@pytest.mark.parametrize(
    "name", ["swe_bench", "swe_bench_live", "swe_gym", "swe_rebench", "swe_pro", "swe_smith"]
)
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("FAIL_TO_PASS", "[]", "nothing could show that the task is solved"),
        ("FAIL_TO_PASS", "test_one", "neither a list nor JSON nor a Python literal"),
        ("PASS_TO_PASS", {"a": 1}, "must be a list of test ids"),
        ("PASS_TO_PASS", rows.F2P, "is in both FAIL_TO_PASS and PASS_TO_PASS"),
        ("patch", "", "patch: String should have at least 1 character"),
        ("patch", "see the pull request", "the patch is not a unified diff"),
        ("patch", rows.GOLD.replace("pkg/core.py", "../x"), "the patch leaves the folder"),
        ("problem_statement", None, "problem_statement: Input should be a valid string"),
        ("instance_id", "a b; rm -rf /", "instance_id: String should match pattern"),
    ],
)
def test_rows_that_cannot_be_graded(tmp_path: Path, name: str, key: str, value: object, message: str) -> None:
    made = {entry[0]: entry[1] for entry in SETS}[name]()
    made.pop(key.lower() if name == "swe_pro" and key.isupper() else key, None)
    made[key] = value
    with pytest.raises(TaskError) as caught:
        load(tmp_path, name, made)
    assert message in str(caught.value)
    assert f"row {made['instance_id']}: " in str(caught.value)


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("swe_bench", rows.swe(test_patch=""), "there are no hidden tests"),
        ("swe_bench", rows.swe(repo="some/thing"), "no test command for some/thing"),
        ("swe_bench", rows.swe(repo="flask"), "repo: String should match pattern"),
        ("swe_bench", rows.swe(eval_script="x"), "an eval_script but no log_parser"),
        ("swe_bench_live", rows.live(test_cmds=[]), "no test command for some/thing"),
        ("swe_bench_live", rows.live(log_parser=""), "a test command but no log_parser"),
        ("swe_rebench", rows.rebench(image=""), "the row names no image"),
        ("swe_pro", rows.pro(run_script=""), "no run_script.sh: tasks.assets must name"),
        ("swe_pro", rows.pro(base_commit="HEAD; rm -rf /"), "base_commit is not a commit id"),
        ("swe_smith", rows.smith(image_name=""), "image_name: String should have at least"),
        ("swe_smith", rows.smith(FAIL_TO_PASS=["TestX"]), "the tests are not pytest's"),
        ("r2e_gym", rows.r2e(expected_output_json="{}"), "has no test that passes"),
        ("r2e_gym", rows.r2e(expected_output_json="nope"), "not JSON"),
        ("r2e_gym", rows.r2e(expected_output_json='{"a": "GREAT"}'), "Input should be 'PASSED'"),
        ("r2e_gym", rows.r2e(execution_result_content="{}"), "the grader would have no hidden tests"),
        ("r2e_gym", rows.r2e(docker_image=""), "docker_image: String should have at least"),
        ("slime", rows.slime(eval_cmd=""), "none of swepro, eval_cmd and f2p_script"),
        ("slime", rows.slime(image=""), "names no image or no workdir"),
        ("slime", rows.slime_pro(fail_to_pass=[]), "fail_to_pass is empty"),
        ("slime", rows.slime_pro(run_script_path="/etc/passwd"), "is not below"),
        ("slime", rows.slime_pro(run_script_path="../rows.jsonl"), "is not below"),
        ("slime", rows.slime_pro(run_script_path="a/none.sh"), "does not exist"),
        ("slime", {"prompt": "x", "metadata": None}, "metadata: Input should be"),
    ],
)
def test_what_only_one_set_can_get_wrong(
    tmp_path: Path, name: str, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(TaskError) as caught:
        load(tmp_path, name, row, assets=None if name == "swe_pro" else assets(tmp_path))
    assert message in str(caught.value)


def folder(root: Path, **more: Any) -> Path:
    made = root / "tasks" / "some__thing-9"
    made.mkdir(parents=True)
    keys = {"repo": "some/thing", "base_commit": "0123456", "image": "i:1", "log_parser": "pytest"}
    (made / "task.yaml").write_text(yaml.safe_dump(keys | more))
    (made / "tests.json").write_text(json.dumps({"FAIL_TO_PASS": rows.F2P, "PASS_TO_PASS": rows.P2P}))
    (made / "problem_statement.md").write_text(rows.ISSUE)
    (made / "hints.md").write_text("return 1")
    (made / "gold.patch").write_text(rows.GOLD)
    (made / "test.patch").write_text(rows.TESTS)
    (made / "eval.sh").write_text(f"echo '{START}'\npytest -rA\necho '{END}'\n")
    return made


def test_task_folders_of_version_5(tmp_path: Path) -> None:
    folder(tmp_path)
    (item,) = RowSource("f", format_of("swe_bench_folders"), tmp_path).every()
    assert (item.task.id, item.task.setup.image) == ("some__thing-9", "i:1")
    assert item.oracle.tests.fail_to_pass == tuple(rows.F2P)
    assert "return 1" not in item.task.prompt


def test_a_task_repository_of_version_5(tmp_path: Path) -> None:
    made = folder(tmp_path, split="test", datasets=["Full", "Lite"], eval_type="pass_and_fail")
    (made / "test_assets" / "tests").mkdir(parents=True)
    (made / "test_assets" / "tests" / "page.png").write_bytes(b"\x89PNG")
    for number, (split, sets) in enumerate((("deprecated", ["Full"]), ("test", ["Full"]), ("dev", ["Lite"]))):
        other = made.with_name(f"other-{number}")
        shutil.copytree(made, other)
        keys = yaml.safe_load((made / "task.yaml").read_text()) | {"split": split, "datasets": sets}
        (other / "task.yaml").write_text(yaml.safe_dump(keys | {"image": f"j:{number}"}))
    form = format_of("swe_bench_folders")

    def ids(name: str) -> list[str]:
        return [item.task.id for item in RowSource("f", form, Path(f"{tmp_path}{name}")).every()]

    assert len(ids("")) == 4, "without sweb.yaml all are taken"
    with pytest.raises(TaskError, match=r"has no sweb\.yaml that names data sets"):
        ids("@Lite")
    (tmp_path / "sweb.yaml").write_text("datasets: [Full, Lite]\n")
    assert ids("") == ["other-1", "some__thing-9"]
    assert ids("@Lite") == ["some__thing-9"]
    with pytest.raises(TaskError, match="has no Verified; it has Full, Lite"):
        ids("@Verified")
    (item,) = RowSource("f", form, Path(f"{tmp_path}@Lite")).every()
    assert item.oracle.tests.files["tests/page.png"].content == b"\x89PNG"
    keys = yaml.safe_load((made / "task.yaml").read_text())
    (made / "task.yaml").write_text(yaml.safe_dump(keys | {"eval_type": "fail_only"}))
    with pytest.raises(TaskError, match="eval_type 'fail_only' counts tests that did not run as passed"):
        ids("@Lite")


def test_task_folders_that_are_wrong(tmp_path: Path) -> None:
    made = folder(tmp_path)
    (made / "task.yaml").write_text("a: [")
    with pytest.raises(TaskError, match="is not YAML"):
        RowSource("f", format_of("swe_bench_folders"), tmp_path)
    (made / "task.yaml").write_text("repo: some/thing\n")
    (made / "tests.json").write_text("{}")
    with pytest.raises(TaskError, match="FAIL_TO_PASS: Field required"):
        RowSource("f", format_of("swe_bench_folders"), tmp_path)


def test_images_can_be_pinned_and_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(rows.smith()) + "\n" + json.dumps(rows.rebench(image="")) + "\n")
    pins = tmp_path / "images.json"
    pin = "registry.example/x@sha256:" + "0" * 64
    pins.write_text(json.dumps({"swebench/swesmith.x86_64.some_1776_thing.0123abcd": pin}))
    smith = load_config(
        None,
        ["tasks.source=swe_smith", f"tasks.path={path}", f"tasks.images={pins}", "tasks.on_invalid_row=skip"],
    )
    assert [i.task.setup.image for i in open_rows(smith, Limits(), runner_for).every()] == [pin]
    pins.write_text(json.dumps({"some__thing-7": "local/built:1"}))
    rebench = load_config(
        None,
        [
            "tasks.source=swe_rebench",
            f"tasks.path={path}",
            f"tasks.images={pins}",
            "tasks.on_invalid_row=skip",
        ],
    )
    assert [i.task.setup.image for i in open_rows(rebench, Limits(), runner_for).every()] == ["local/built:1"]


def test_what_a_sets_own_parser_wrote_is_read() -> None:
    text = json.dumps(
        {"tests": [{"name": "a", "status": "passed"}, {"name": "b", "status": "FAILED"}, {"name": 3}]}
    )
    assert parse_log("tests_json", text).outcomes == {}
    text = json.dumps(
        {"tests": [{"name": "a", "status": "passed"}, {"name": "b", "status": "FAILED"}]}, indent=1
    )
    assert parse_log("tests_json", text).outcomes == {"a": "PASSED", "b": "FAILED"}
    for broken in ("", "{}", "[]", '{"tests": 3}', "not json"):
        assert parse_log("tests_json", broken).outcomes == {}
    twice = '{"tests": [{"name": "a", "status": "PASSED"}, {"name": "a", "status": "FAILED"}]}'
    assert parse_log("tests_json", twice).outcomes == {"a": "FAILED"}


def test_matplotlib_names_its_buttons() -> None:
    assert parse_log("matplotlib", "PASSED t.py::a[MouseButton.LEFT-x]\n").outcomes == {
        "t.py::a[1-x]": "PASSED"
    }
