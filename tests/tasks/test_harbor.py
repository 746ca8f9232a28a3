"""Task folders of Harbor and of Terminal-Bench 1."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from insitu.errors import RecordError, TaskError
from insitu.grading.runners.find import runner_for
from insitu.storage.image_builds import build_context, context_digest, register_build
from insitu.tasks.dataset import LoadOptions, RowSource
from insitu.tasks.factory import format_of
from insitu.types import Limits, task_hash
from insitu_tasksets.container_plan import Health, McpServer, read_plan
from insitu_tasksets.live import everywhere


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSITU_CACHE", str(tmp_path_factory.mktemp("cache")))


TOML = """\
version = "1.4"
[task]
name = "made/words"
[environment]
docker_image = "registry.example/words:1"
cpus = 1
[agent]
timeout_sec = 33.0
[verifier]
timeout_sec = 44.0
env = { WHO = "it's us" }
"""


def write(folder: Path, texts: Mapping[str, str], changed: Mapping[str, str | None]) -> Path:
    for name, text in {**texts, **changed}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if text is None:
            path.unlink(missing_ok=True)
        else:
            path.write_text(text)
    return folder


def harbor(root: Path, **files: str | None) -> Path:
    texts = {
        "task.toml": TOML,
        "instruction.md": "Count the words.\n",
        "environment/Dockerfile": "FROM debian\nWORKDIR /data\nWORKDIR rel\n",
        "tests/test.sh": "grep -q 3 out.txt && echo 1 > /logs/verifier/reward.txt\n",
        "solution/solve.sh": "echo 3 > out.txt\n",
    }
    return write(root / "words", texts, files)


def test_a_harbor_folder(tmp_path: Path) -> None:
    harbor(tmp_path)
    (item,) = RowSource("harbor", format_of("harbor"), tmp_path).every()
    task, oracle = item.task, item.oracle
    assert (task.id, task.prompt) == ("words", "Count the words.")
    assert (task.setup.image, task.setup.workdir) == ("registry.example/words:1", "/data/rel")
    assert (task.limits.wall_s, task.grading.timeout_s) == (33.0, 44.0)
    assert task.grading.runner == "harbor"
    assert set(oracle.tests.files) == {"tests/test.sh"}
    assert oracle.tests.files["tests/test.sh"].content.startswith(b"grep -q 3")
    assert oracle.tests.env == {"WHO": "it's us"}
    assert set(oracle.solve) == {"solve.sh"}
    assert task.files == {}


@pytest.mark.parametrize(
    ("lines", "memory_mb"),
    [
        ("cpus = 1", 0),
        ("memory_mb = 8192", 8192),
        ('memory = "2G"', 2048),
        ('memory = "512MiB"\nstorage = "1T"', 512),
        ('memory = "1.5 gb"\nmemory_mb = 100', 1536),
        ("memory = 1048576\ngpus = 0\nstorage_mb = 10240", 1),
    ],
)
def test_the_memory_that_a_task_wants_is_given(tmp_path: Path, lines: str, memory_mb: int) -> None:
    harbor(tmp_path, **{"task.toml": TOML.replace("cpus = 1", lines)})
    (item,) = RowSource("harbor", format_of("harbor"), tmp_path, LoadOptions(memory_mb=8192)).every()
    assert item.task.setup.memory_mb == memory_mb
    plain = replace(item.task.setup, memory_mb=0)
    changed = task_hash(item.task.prompt, {}, item.task.grading, plain) != item.task.content_hash
    assert changed == bool(memory_mb)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("memory_mb = 8193", "environment.memory is 8193 MB, more than sandbox.memory_mb = 8192: raise that"),
        ('memory = "9G"', "environment.memory is 9216 MB, more than sandbox.memory_mb = 8192: raise that"),
        ("storage_mb = 5000", "environment.storage is 5000 MB, more than sandbox.disk_mb = 4096: raise that"),
        ("gpus = 1", "environment.gpus is 1: sandboxes have no GPU"),
        ('memory = "much"', "environment.memory: 'much' is no size like 8G"),
    ],
)
def test_more_than_a_sandbox_has_is_refused_in_one_line(tmp_path: Path, lines: str, message: str) -> None:
    harbor(tmp_path, **{"task.toml": TOML.replace("cpus = 1", lines)})
    with pytest.raises(TaskError) as caught:
        RowSource("harbor", format_of("harbor"), tmp_path, LoadOptions(memory_mb=8192, disk_mb=4096))
    assert message in str(caught.value)


def test_what_a_container_needs_beside_its_image(tmp_path: Path) -> None:
    lines = """\
cpus = 2
env = { A = "${HERE:-one}" }
healthcheck = { command = "curl api", interval_sec = 1.0, timeout_sec = 2.0, retries = 30 }
[[environment.mcp_servers]]
name = "words"
transport = "http"
url = "http://words:8000/mcp"
"""
    compose = "services:\n  words:\n    image: made/words:1\n"
    harbor(
        tmp_path,
        **{"task.toml": TOML.replace("cpus = 1\n", lines), "environment/docker-compose.yaml": compose},
    )
    (item,) = RowSource("harbor", format_of("harbor"), tmp_path).every()
    plan = read_plan(item.task.setup.container)
    assert item.task.setup.cpus == 2
    assert plan.env == {"A": "one"}
    assert plan.health == Health(argv=("/bin/sh", "-c", "curl api"), deadline_s=90.0, timeout_s=2.0)
    assert plan.mcp_servers == (
        McpServer(name="words", transport="streamable-http", url="http://words:8000/mcp"),
    )
    assert [service.name for service in plan.services] == ["words"]
    plain = replace(item.task.setup, container="")
    assert task_hash(item.task.prompt, {}, item.task.grading, plain) != item.task.content_hash


def test_cores_that_the_machine_lacks_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    harbor(tmp_path, **{"task.toml": TOML.replace("cpus = 1", "cpus = 9999")})
    for _ in range(2):
        RowSource("harbor", format_of("harbor"), tmp_path).every()
    assert len([line for line in caplog.messages if "environment.cpus = 9999" in line]) == 1


@pytest.mark.parametrize(
    ("dockerfile", "workdir"),
    [
        ("FROM a\nWORKDIR /b\nWORKDIR c\n", "/b/c"),
        ("FROM a\nWORKDIR /b/../c/\n", "/c"),
        ('FROM a\n  workdir "/b c"\n', "/b c"),
        ("FROM a AS one\nWORKDIR /b\nFROM one\nRUN true\n", ""),
        ("FROM a AS one\nWORKDIR /b\nFROM d\nWORKDIR /e\n", "/e"),
        ("FROM a\nWORKDIR b\n", ""),
        ("FROM a\nWORKDIR $HOME\n", ""),
        ("FROM a\nWORKDIR /$NAME\n", ""),
        ("FROM a\nWORKDIR /\n", ""),
        ("FROM a\n", ""),
    ],
)
def test_the_work_folder_is_the_dockerfiles_or_the_images(
    tmp_path: Path, dockerfile: str, workdir: str
) -> None:
    harbor(tmp_path, **{"environment/Dockerfile": dockerfile})
    (item,) = RowSource("harbor", format_of("harbor"), tmp_path).every()
    assert item.task.setup.workdir == workdir
    toml = TOML.replace("cpus = 1", 'workdir = "/named"')
    harbor(tmp_path, **{"environment/Dockerfile": dockerfile, "task.toml": toml})
    (item,) = RowSource("harbor", format_of("harbor"), tmp_path).every()
    assert item.task.setup.workdir == "/named"


def test_an_image_is_named_after_the_content_it_is_built_from(tmp_path: Path) -> None:
    folder = harbor(tmp_path / "one", **{"task.toml": "[task]\nname = 'x'\n"})
    (item,) = RowSource("harbor", format_of("harbor"), tmp_path / "one").every()
    image = item.task.setup.image
    assert re.fullmatch(r"insitu-build:[0-9a-f]{32}", image)
    assert build_context(image) == (folder / "environment").resolve()
    (folder / "environment" / "Dockerfile").write_text("FROM debian\nWORKDIR /other\n")
    with pytest.raises(RecordError, match="changed since the task was loaded"):
        build_context(image)
    (other,) = RowSource("harbor", format_of("harbor"), tmp_path / "one").every()
    assert other.task.setup.image != image
    assert other.task.content_hash != item.task.content_hash
    options = LoadOptions(images={"words": "local/words:1"})
    (mine,) = RowSource("harbor", format_of("harbor"), tmp_path / "one", options).every()
    assert mine.task.setup.image == "local/words:1"


def test_a_context_is_named_by_paths_modes_links_and_content(tmp_path: Path) -> None:
    seen = set()
    for change in ("", "chmod", "link", "rename", "edit"):
        context = tmp_path / (change or "plain")
        context.mkdir()
        (context / "Dockerfile").write_text("FROM debian\n" + ("RUN true\n" if change == "edit" else ""))
        data = context / ("other" if change == "rename" else "data")
        data.write_text("1")
        if change == "chmod":
            data.chmod(0o755)
        if change == "link":
            (context / "link").symlink_to("data")
        seen.add(register_build(context))
        assert context_digest(context) == context_digest(context)
    assert len(seen) == 5


def test_variables_that_the_host_would_fill_in(tmp_path: Path) -> None:
    env = 'env = { A = "${HERE:-one two}" }'
    harbor(tmp_path, **{"task.toml": TOML.replace('env = { WHO = "it\'s us" }', env)})
    (item,) = RowSource("harbor", format_of("harbor"), tmp_path).every()
    assert item.oracle.tests.env == {"A": "one two"}
    harbor(tmp_path, **{"task.toml": TOML.replace("it's us", "${OPENAI_API_KEY}")})
    with pytest.raises(TaskError, match=r"verifier\.env\.WHO reads OPENAI_API_KEY from the host"):
        RowSource("harbor", format_of("harbor"), tmp_path)


SEPARATE = TOML.replace("44.0", '44.0\nenvironment_mode = "separate"')


def test_separate_tests_get_the_artifacts_alone(tmp_path: Path) -> None:
    artifacts = "artifacts = ['/data/rel/out', 'log.txt', {source = '/srv/made/page.html'}, '/var/db']\n"
    harbor(tmp_path, **{"task.toml": artifacts + SEPARATE})
    (item,) = RowSource("harbor", format_of("harbor"), tmp_path).every()
    paths = ("out", "log.txt", "/srv/made/page.html", "/var/db", "/logs/artifacts")
    assert item.oracle.tests.carried == paths
    assert item.oracle.tests.image == ""
    assert item.task.setup.roots == ("/srv/made", "/var/db", "/logs/artifacts")
    harbor(tmp_path, **{"task.toml": artifacts + TOML})
    (item,) = RowSource("harbor", format_of("harbor"), tmp_path).every()
    assert (item.oracle.tests.carried, item.task.setup.roots) == ((), ())


def test_tests_may_have_an_image_of_their_own(tmp_path: Path) -> None:
    own = "[verifier.environment]\nenv = { A = 'b', WHO = 'x' }\n"
    folder = harbor(tmp_path, **{"task.toml": TOML + own, "tests/Dockerfile": "FROM debian\n"})
    (item,) = RowSource("harbor", format_of("harbor"), tmp_path).every()
    assert build_context(item.oracle.tests.image) == (folder / "tests").resolve()
    assert item.oracle.tests.carried == ("/logs/artifacts",)
    assert item.oracle.tests.env == {"A": "b", "WHO": "it's us"}
    harbor(tmp_path, **{"task.toml": TOML + own + "docker_image = 'made/judge:1'\n"})
    (item,) = RowSource("harbor", format_of("harbor"), tmp_path).every()
    assert item.oracle.tests.image == "made/judge:1"
    with pytest.raises(TaskError, match="it cannot ask the agent's sandbox"):
        RowSource("harbor", format_of("harbor"), tmp_path, transform=everywhere)


UNHELD = (
    ('skills_dir = "/skills"', "environment.skills_dir is not supported"),
    ('network_mode = "allowlist"', "environment.allowed_hosts is not supported: sandboxes have no network"),
    ('allowed_hosts = ["pypi.org"]', "environment.allowed_hosts is not supported: sandboxes have no network"),
    ('network_mode = "some"', "environment.network_mode: Input should be"),
)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"task.toml": "["}, "words"),
        ({"instruction.md": None}, "instruction.md is missing"),
        ({"instruction.md": " \n"}, "the prompt is empty"),
        ({"tests/test.sh": None}, "tests/test.sh is missing: nothing can be graded"),
        *(({"task.toml": TOML.replace("cpus = 1", lines)}, message) for lines, message in UNHELD),
        ({"task.toml": TOML.replace("33.0", "33.0\nallowed_hosts = ['x']")}, "agent.allowed_hosts is not"),
        *(
            (
                {"task.toml": TOML.replace("cpus = 1", f"mcp_servers = [{{name = 'a', url = 'u'}}, {more}]")},
                "environment.mcp_servers: each needs a name of its own, other than insitu",
            )
            for more in ("{name = 'a', url = 'v'}", "{name = 'insitu', url = 'v'}")
        ),
        ({"task.toml": TOML.replace("cpus = 1", "mcp_servers = [{}]")}, "mcp_servers.0.name: Field required"),
        (
            {"task.toml": TOML.replace("cpus = 1", "mcp_servers = [{name = 'a', url = ''}]")},
            "transport sse needs url",
        ),
        (
            {"task.toml": TOML.replace("cpus = 1", "env = { A = '${B}' }")},
            "environment.env.A reads B from the host",
        ),
        ({"task.toml": TOML.replace("cpus = 1", 'os = "windows"')}, "environment.os is windows"),
        (
            {"task.toml": TOML.replace("cpus = 1", "healthcheck = { retries = 3 }")},
            "healthcheck.command: Field required",
        ),
        ({"task.toml": TOML.replace("33.0", '33.0\nuser = "agent"')}, "agent.user is not supported"),
        ({"task.toml": TOML.replace("44.0", "44.0\nuser = 0")}, "verifier.user is not supported"),
        ({"task.toml": TOML + "[[verifier.collect]]\ncommand = 'x'\n"}, "verifier.collect is not supported"),
        ({"task.toml": TOML + "[verifier.environment]\n"}, "names no docker_image and has no Dockerfile"),
        (
            {"task.toml": TOML + "[verifier.environment]\nhealthcheck = {command = 'x'}\n"},
            "verifier.environment: services, health checks",
        ),
        (
            {"task.toml": "artifacts = [{source = '/x', service = 'db'}]\n" + SEPARATE},
            "artifacts: exclude and service of '/x' are not supported",
        ),
        (
            {"task.toml": SEPARATE, "environment/Dockerfile": "FROM debian\n"},
            "a separate verifier needs environment.workdir",
        ),
        (
            {"task.toml": "[task]\nname = 'x'\n", "environment/Dockerfile": None},
            "names no docker_image and has no Dockerfile",
        ),
        (
            {"environment/docker-compose.yaml": "services:\n  db:\n    image: x\n    privileged: true\n"},
            "docker-compose.yaml: services.db.privileged is not supported",
        ),
        ({"task.toml": TOML.replace("33.0", "-1.0")}, "agent.timeout_sec: Input should be greater than 0"),
    ],
)
def test_folders_that_cannot_be_used(tmp_path: Path, files: dict[str, str | None], message: str) -> None:
    harbor(tmp_path, **files)
    with pytest.raises(TaskError) as caught:
        RowSource("harbor", format_of("harbor"), tmp_path)
    assert message in str(caught.value)


def test_what_is_refused_of_a_folder_is_counted_by_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changes = [TOML.replace("cpus = 1", 'os = "windows"')] * 3
    changes += [TOML.replace("cpus = 1", f"memory_mb = {size}") for size in (9000, 9001)]
    for number, toml in enumerate([TOML, *changes]):
        prompt = f"Count {number}."
        harbor(tmp_path, **{"task.toml": toml, "instruction.md": prompt}).rename(tmp_path / f"t{number}")
    options = LoadOptions(memory_mb=8192)
    with pytest.raises(TaskError) as caught:
        RowSource("harbor", format_of("harbor"), tmp_path, options)
    counted = (
        "5 of 6 rows are refused: 3 x environment.os is windows: only Linux is supported,"
        " 2 x environment.memory is ... MB, more than sandbox.memory_mb = ...: raise that"
    )
    assert str(caught.value).count("only Linux is supported") == 4
    assert f"; {counted}; tasks.on_invalid_row=skip" in str(caught.value)
    source = RowSource("harbor", format_of("harbor"), tmp_path, options, on_invalid_row="skip")
    assert [item.task.id for item in source.every()] == ["t0"]
    assert caplog.messages == [counted]


STEPS = (
    TOML
    + """\
[[steps]]
name = "count"
min_reward = { reward = 0.5 }
[[steps]]
name = "say"
[steps.agent]
timeout_sec = 7
[steps.verifier]
timeout_sec = 8
env = { WHO = "me" }
"""
)


def several(root: Path, **files: str | None) -> Path:
    texts = {
        "task.toml": STEPS,
        "instruction.md": None,
        "tests/test.sh": "echo shared\n",
        "tests/common.sh": "a\n",
        "steps/count/instruction.md": "Count.\n",
        "steps/count/tests/test.sh": "echo own\n",
        "steps/count/solution/solve.sh": "echo 3\n",
        "steps/say/instruction.md": "Say it.\n",
        "steps/say/workdir/setup.sh": "echo\n",
        "steps/say/solution/solve.sh": "echo 3\n",
    }
    return harbor(root, **{**texts, **files})


def test_a_harbor_folder_of_several_steps(tmp_path: Path) -> None:
    several(tmp_path)
    (item,) = RowSource("harbor", format_of("harbor"), tmp_path).every()
    task, oracle = item.task, item.oracle
    count, say = task.steps
    assert (task.id, task.prompt) == ("words", "Step count: Count.\n\nStep say: Say it.")
    assert (count.name, count.task.prompt, count.command, count.min_reward) == ("count", "Count.", "", 0.5)
    assert (say.name, say.task.prompt, say.command, say.min_reward) == (
        "say",
        "Say it.",
        "bash setup.sh",
        None,
    )
    assert (count.task.limits.wall_s, say.task.limits.wall_s, task.limits.wall_s) == (33.0, 7.0, 40.0)
    plans = [one.grading.timeout_s for one in (count.task, say.task, task)]
    assert plans == [44.0, 8.0, 52.0]
    assert (task.grading.steps, {count.task.setup, say.task.setup}) == ("mean", {task.setup})
    assert ({*count.files}, {*say.files}, {*say.task.files}) == (set(), {"setup.sh"}, {"setup.sh"})
    first, second = oracle.steps
    assert first.tests.files["tests/test.sh"].content == b"echo own\n"
    assert second.tests.files["tests/test.sh"].content == b"echo shared\n"
    assert {*first.tests.files} == {*second.tests.files} == {"tests/test.sh", "tests/common.sh"}
    assert (first.tests.env, second.tests.env) == ({"WHO": "it's us"}, {"WHO": "me"})
    hashes = {task.content_hash}
    for changed in (
        {"steps/say/instruction.md": "Say so.\n"},
        {"task.toml": STEPS.replace("0.5", "0.6")},
        {"task.toml": "multi_step_reward_strategy = 'final'\n" + STEPS},
        {"steps/say/workdir/setup.sh": "echo 2\n"},
    ):
        several(tmp_path, **changed)
        (item,) = RowSource("harbor", format_of("harbor"), tmp_path).every()
        hashes.add(item.task.content_hash)
    assert len(hashes) == 5


def test_the_base_of_a_step_has_the_files_of_those_before_it(tmp_path: Path) -> None:
    laid = {"steps/count/workdir/a": "1\n", "steps/count/workdir/b": "1\n", "steps/say/workdir/b": "2\n"}
    several(tmp_path, **laid)
    (item,) = RowSource("harbor", format_of("harbor"), tmp_path).every()
    count, say = item.task.steps
    assert {path: entry.content for path, entry in say.task.files.items() if path != "setup.sh"} == {
        "a": b"1\n", "b": b"2\n",
    }  # fmt: skip
    assert ({*count.files}, {*say.files}) == ({"a", "b"}, {"b", "setup.sh"})
    assert item.task.files == count.task.files == count.files
    (tmp_path / "words/steps/say/workdir/a").write_text("1\n")
    (again,) = RowSource("harbor", format_of("harbor"), tmp_path).every()
    assert again.task.steps[1].task == say.task
    assert again.task.content_hash != item.task.content_hash, "a is laid again in the second step"


def test_the_wall_time_of_the_run_holds_for_all_steps_that_have_none(tmp_path: Path) -> None:
    toml = STEPS.replace("timeout_sec = 33.0\n", "").replace("timeout_sec = 7\n", "")
    several(tmp_path, **{"task.toml": toml})
    options = LoadOptions(limits=Limits(wall_s=50.0))
    (item,) = RowSource("harbor", format_of("harbor"), tmp_path, options).every()
    assert [one.limits.wall_s for one in (item.task, *(s.task for s in item.task.steps))] == [50.0] * 3


def test_artifacts_of_one_step_may_lie_in_those_of_another(tmp_path: Path) -> None:
    mode = STEPS.replace("[verifier]\n", "[verifier]\nenvironment_mode = 'separate'\n")
    toml = mode.replace('name = "count"', 'name = "count"\nartifacts = ["/out"]')
    toml = toml.replace('name = "say"', 'name = "say"\nartifacts = ["/out/deep"]')
    several(tmp_path, **{"task.toml": toml})
    (item,) = RowSource("harbor", format_of("harbor"), tmp_path).every()
    assert {*item.task.setup.roots} == {"/out", "/logs/artifacts"}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"steps/say/instruction.md": None}, "steps/say/instruction.md is missing"),
        ({"task.toml": STEPS.replace("reward = 0.5", "reward = 1.5")}, "min_reward is 1.5, and no reward"),
        ({"task.toml": STEPS.replace('"say"', '"environment"')}, "steps: environment is the name of another"),
        ({"steps/count/workdir/a": "", "steps/say/workdir/a/b": ""}, "a/b lies under a file"),
        ({"tests/test.sh": None}, "steps/say/tests/test.sh is missing: nothing can be graded"),
        ({"task.toml": STEPS.replace('"say"', '"count"')}, "steps: count is there twice"),
        (
            {"task.toml": STEPS.replace("timeout_sec = 7", "user = 'a'")},
            "steps.say.agent.user is not supported",
        ),
        (
            {"task.toml": STEPS.replace("reward = 0.5", "style = 0.5")},
            "min_reward: only `reward` is read, not 'style'",
        ),
        ({"task.toml": STEPS + "[steps.healthcheck]\ncommand = 'x'\n"}, "steps.say.healthcheck is not"),
        ({"task.toml": STEPS + "[steps.verifier.environment]\n"}, "steps.say.verifier.environment is not"),
        ({"task.toml": STEPS.replace('"say"', '".."')}, "steps.1.name: String should match"),
        ({"task.toml": "multi_step_reward_strategy = 'best'\n" + STEPS}, "multi_step_reward_strategy: Input"),
    ],
)
def test_steps_that_cannot_be_used(tmp_path: Path, files: dict[str, str | None], message: str) -> None:
    several(tmp_path, **files)
    with pytest.raises(TaskError) as caught:
        RowSource("harbor", format_of("harbor"), tmp_path)
    assert message in str(caught.value)


def test_the_tests_of_steps_stay_out_of_the_agents_sandbox(tmp_path: Path) -> None:
    several(tmp_path)
    with pytest.raises(TaskError, match="would be there for the next step"):
        RowSource("harbor", format_of("harbor"), tmp_path, transform=everywhere)


def test_a_task_that_asks_for_the_network_is_taken_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = 'cpus = 1\nnetwork_mode = "public"'
    harbor(tmp_path, **{"task.toml": TOML.replace("cpus = 1", lines)})
    RowSource("harbor", format_of("harbor"), tmp_path)
    RowSource("harbor", format_of("harbor"), tmp_path)
    assert caplog.text.count("tasks ask for a public network") == 1
    harbor(tmp_path, **{"task.toml": TOML.replace("cpus = 1", 'network_mode = "no-network"')})
    RowSource("harbor", format_of("harbor"), tmp_path)


YAML = """\
instruction: |-
  Count the words.
author_email: a@example.org
difficulty: easy
parser_name: pytest
max_agent_timeout_sec: 33.0
max_test_timeout_sec: 44.0
"""
COMPOSE = "services:\n  client:\n    build:\n      dockerfile: Dockerfile\n"


def terminal_bench(root: Path, **files: str | None) -> Path:
    texts = {
        "task.yaml": YAML,
        "Dockerfile": "FROM debian\nWORKDIR /app\n",
        "docker-compose.yaml": COMPOSE,
        "run-tests.sh": "python3 -m pytest $TEST_DIR/test_outputs.py -rA\n",
        "solution.sh": "echo 3 > out.txt\n",
        "tests/test_outputs.py": "def test_it(): assert open('/app/out.txt').read() == '3'\n",
    }
    return write(root / "words", texts, files)


def test_a_folder_of_terminal_bench_1(tmp_path: Path) -> None:
    terminal_bench(tmp_path / "tasks")
    (item,) = RowSource("terminal_bench", format_of("terminal_bench"), tmp_path).every()
    task, oracle = item.task, item.oracle
    assert (task.id, task.prompt, task.setup.workdir) == ("words", "Count the words.", "/app")
    assert (task.limits.wall_s, task.grading.timeout_s, task.grading.runner) == (33.0, 44.0, "harbor")
    assert set(oracle.tests.files) == {"tests/test.sh", "tests/run-tests.sh", "tests/test_outputs.py"}
    assert oracle.solve["solve.sh"].content == b"echo 3 > out.txt\n"
    runner_for(task, oracle)
    assert task.setup.container == ""


def test_a_folder_of_terminal_bench_1_with_a_service(tmp_path: Path) -> None:
    client = """\
    image: ${T_BENCH_TASK_DOCKER_CLIENT_IMAGE_NAME}
    container_name: ${T_BENCH_TASK_DOCKER_CLIENT_CONTAINER_NAME}
    command: ["sh", "-c", "sleep infinity"]
    environment: ["TEST_DIR=${T_BENCH_TEST_DIR}"]
    volumes: ["${T_BENCH_TASK_LOGS_PATH}:${T_BENCH_CONTAINER_LOGS_PATH}"]
    depends_on: [db]
"""
    terminal_bench(tmp_path, **{"docker-compose.yaml": f"{COMPOSE}{client}  db:\n    image: made/db:1\n"})
    (item,) = RowSource("terminal_bench", format_of("terminal_bench"), tmp_path).every()
    plan = read_plan(item.task.setup.container)
    assert (plan.names, plan.env, plan.volumes) == (("client",), {}, ())
    assert [(one.name, one.image) for one in plan.services] == [("db", "made/db:1")]


def test_a_solution_that_is_typed_into_a_terminal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    typed = "- command: cd /app\n  block: true\n- command: |\n    echo 3 \\\n      > out.txt\n"
    terminal_bench(tmp_path, **{"solution.sh": None, "solution.yaml": typed})
    (item,) = RowSource("terminal_bench", format_of("terminal_bench"), tmp_path).every()
    made = item.oracle.solve["solve.sh"].content
    assert made == b"#!/bin/bash\ncd /app\necho 3 \\\n  > out.txt\n\n"
    keys = "- command: vim out.txt\n- command: ':wq'\n  append_enter: false\n"
    terminal_bench(tmp_path, **{"solution.sh": None, "solution.yaml": keys})
    (item,) = RowSource("terminal_bench", format_of("terminal_bench"), tmp_path).every()
    assert item.oracle.solve == {}
    assert "presses keys" in caplog.text
    terminal_bench(tmp_path, **{"solution.sh": None, "solution.yaml": "command: x\n"})
    with pytest.raises(TaskError, match=r"solution.yaml is not a list of commands"):
        RowSource("terminal_bench", format_of("terminal_bench"), tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"run-tests.sh": None}, "run-tests.sh is missing"),
        ({"task.yaml": "difficulty: easy\n"}, "instruction: Field required"),
        ({"docker-compose.yaml": COMPOSE + "    cap_add: [SYS_ADMIN]\n"}, "services.client.cap_add is not"),
        ({"Dockerfile": None}, "has no Dockerfile"),
    ],
)
def test_folders_of_terminal_bench_1_that_cannot_be_used(
    tmp_path: Path, files: dict[str, str | None], message: str
) -> None:
    terminal_bench(tmp_path, **files)
    with pytest.raises(TaskError) as caught:
        RowSource("terminal_bench", format_of("terminal_bench"), tmp_path)
    assert message in str(caught.value)
