"""docker-compose.yaml of task folders: what is read of it, and what is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from insitu.errors import TaskError
from insitu.storage.image_builds import build_context, dockerfile_of
from insitu_tasksets.compose import compose_file, read_compose, seconds
from insitu_tasksets.container_plan import ContainerPlan, Health, read_plan


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSITU_CACHE", str(tmp_path_factory.mktemp("cache")))


FULL = """\
x-common: &common
  restart: unless-stopped
services:
  main:
    build: {context: ., dockerfile: Dockerfile}
    command: ["sh", "-c", "sleep infinity"]
    depends_on:
      api: {condition: service_healthy}
      seed: {condition: service_completed_successfully}
    environment:
      API_URL: http://api:8000
      TEST_DIR: ${TEST_DIR}
    volumes:
      - ${HOST_VERIFIER_LOGS_PATH}:${ENV_VERIFIER_LOGS_PATH}
      - shared:/shared
  api:
    <<: *common
    build: ./api
    container_name: the-api
    ports: ["8000:8000"]
    environment: ["PORT=8000", "DEBUG=${DEBUG:-no}", "PRICE=$$5"]
    depends_on: [db]
    healthcheck:
      test: ["CMD", "curl", "-f", "http://localhost:8000/"]
      interval: 1s
      timeout: 500ms
      retries: 200
      start_period: 1m
    volumes: ["shared:/data:ro", "./api/conf.ini:/etc/conf.ini:ro"]
    mem_limit: 256m
    cpus: 0.5
    tmpfs: /run
    init: true
  db:
    image: postgres:17
    user: "70"
    healthcheck: {test: pg_isready}
    deploy: {resources: {limits: {cpus: "1", memory: 1G}}}
  seed:
    build: {context: ./api, dockerfile: Dockerfile.seed}
    entrypoint: python seed.py --name "two words"
    depends_on: {db: {condition: service_healthy}}
volumes: {shared: }
networks: {default: }
"""


def folder_of(root: Path, text: str) -> Path:
    (root / "api").mkdir(parents=True, exist_ok=True)
    for name in ("Dockerfile", "api/Dockerfile", "api/Dockerfile.seed", "api/conf.ini"):
        (root / name).write_text("FROM debian\n")
    (root / "docker-compose.yaml").write_text(text)
    return root / "docker-compose.yaml"


def test_what_is_read(tmp_path: Path) -> None:
    path = folder_of(tmp_path, FULL)
    assert compose_file(tmp_path) == path
    found = read_compose(path, "main")
    assert [service.name for service in found.services] == ["db", "api", "seed"]
    db, api, seed = found.services
    assert found.env == {"API_URL": "http://api:8000"}
    assert found.volumes == ("shared:/shared",)
    assert found.after == {"api": "service_healthy", "seed": "service_completed_successfully"}
    assert found.image == ""
    assert api.env == {"PORT": "8000", "DEBUG": "no", "PRICE": "$5"}
    assert api.names == ("the-api",)
    assert api.health == Health(
        argv=("curl", "-f", "http://localhost:8000/"), deadline_s=360.0, timeout_s=0.5
    )
    assert api.volumes == ("shared:/data:ro",)
    assert [(mount.source, mount.target) for mount in api.mounts] == [("api/conf.ini", "/etc/conf.ini")]
    assert build_context(api.mounts[0].folder) == tmp_path.resolve()
    assert (api.memory_mb, api.cpus, api.tmpfs, api.init) == (256, 0.5, ("/run",), True)
    assert build_context(api.image) == (tmp_path / "api").resolve()
    assert dockerfile_of(api.image) == "Dockerfile"
    assert (db.image, db.user, db.memory_mb, db.cpus) == ("postgres:17", "70", 1024, 1.0)
    assert db.health == Health(argv=("/bin/sh", "-c", "pg_isready"), deadline_s=180.0)
    assert build_context(seed.image) == (tmp_path / "api").resolve()
    assert dockerfile_of(seed.image) == "Dockerfile.seed"
    assert seed.entrypoint == ("python", "seed.py", "--name", "two words")


def test_a_plan_names_content_and_no_path(tmp_path: Path) -> None:
    texts = []
    for name in ("one", "two"):
        found = read_compose(folder_of(tmp_path / name, FULL), "main")
        texts.append(ContainerPlan(services=found.services, env=found.env).text)
    assert texts[0] == texts[1]
    assert str(tmp_path) not in texts[0]
    assert read_plan(texts[0]).services == found.services
    (tmp_path / "two" / "api" / "conf.ini").write_text("other")
    changed = read_compose(tmp_path / "two" / "docker-compose.yaml", "main")
    assert ContainerPlan(services=changed.services, env=found.env).text != texts[0]
    assert ContainerPlan().text == ""


@pytest.mark.parametrize(
    ("service", "message"),
    [
        ("privileged: true", "services.db.privileged is not supported"),
        ("network_mode: host", "services.db.network_mode is not supported"),
        ("env_file: .env", "services.db.env_file is not supported"),
        ("cap_add: [NET_ADMIN]", "services.db.cap_add is not supported"),
        ("volumes: ['/etc:/etc:ro']", "services.db.volumes: '/etc:/etc:ro' is not supported"),
        ("volumes: ['./api:/data']", "services.db.volumes: './api:/data' is not supported"),
        ("volumes: ['../x:/data:ro']", "services.db.volumes: '../x:/data:ro' is not supported"),
        ("volumes: ['./../x:/data:ro']", "is not in the folder of the task"),
        ("volumes: ['./no:/data:ro']", "there is no such file"),
        ("volumes: [{type: bind}]", "is not a list of texts"),
        ("build: {context: ., args: {A: b}}", "services.db.build.args is not supported"),
        ("build: ../../", "is not in the folder of the task"),
        ("build: {context: ., dockerfile: Gone}", "there is no Gone in ."),
        ("environment: {A: '${SECRET}'}", "reads SECRET from the host, which sandboxes cannot see"),
        ("environment: [SECRET]", "reads SECRET from the host, which sandboxes cannot see"),
        ("depends_on: [x]", "services.db.depends_on: there is no service 'x'"),
        ("depends_on: [db]", "db wait for each other"),
        ("networks: [back]", "more than one network is not supported"),
        ("healthcheck: {test: [CMD]}", "services.db.healthcheck.test is not supported"),
        ("healthcheck: {test: x, interval: often}", "'often' is no duration like 1m30s"),
        ("mem_limit: much", "services.db.memory: 'much' is no size like 8G"),
        ("command: 'a \"b'", "services.db.command: No closing quotation"),
        ("environment: {A: '${X:?must}'}", "yaml: ${X:?must} is not supported"),
        ("environment: {A: '${X:+must}'}", "yaml: ${X:+must} is not supported"),
        ("environment: {A: '${X:-${Y:-z}}'}", "yaml: ${X:-${Y:-z}} is not supported"),
        ("tmpfs: '${X}'", "reads X from the host"),
        ('environment: {A: "b\\0"}', "a byte of 0 is not supported"),
        ("read_only: 'true'", "services.db.read_only: 'true' is not true or false"),
        ("init: 'true'", "services.db.init: 'true' is not true or false"),
        ("healthcheck: {test: a, disable: 'no'}", "healthcheck.disable: 'no' is not true or false"),
        ("depends_on: {main: {condition: [a]}}", "depends_on.main: ['a'] is not supported"),
        ("networks: {1: a, b: c}", "more than one network is not supported"),
        (f"mem_limit: 1{'0' * 400}", "services.db.memory: '1000"),
        ("shm_size: 9999999999g", "services.db.shm_size: '9999999999g' is no size"),
        ("cpus: abc", "services.db.cpus: 'abc' is no number"),
        ("cpus: .nan", "services.db.cpus: nan is no number"),
        ("cpus: .inf", "services.db.cpus: inf is no number"),
        ("cpus: -1", "services.db.cpus: -1 is no number"),
        (f"healthcheck: {{test: a, retries: 1{'0' * 400}}}", "services.db.healthcheck.retries: 1000"),
        (f"healthcheck: {{test: a, interval: {'9' * 400}s}}", "is no duration like 1m30s"),
        ("hostname: Main", "services.db: the host name main is another service's"),
        ("volumes: ['./lnk:/host:ro']", "the file 'a,src=/,consistency=default' is not supported"),
        ("volumes: ['./out:/host:ro']", "is not in the folder of the task"),
        ('volumes: ["./api:/a\\n:ro"]', "services.db.volumes: './api:/a\\n:ro' is not supported"),
        ('volumes: ["./api:/a\\":ro"]', "is not supported"),
        ("volumes: [x]\nvolumes: {../../x: }", "yaml: volumes.../../x is not supported"),
    ],
)
def test_what_is_refused_is_named(tmp_path: Path, service: str, message: str) -> None:
    image = "" if service.startswith("build") else "    image: x\n"
    (tmp_path / "task" / "a,src=" / ",consistency=default").mkdir(parents=True)
    (tmp_path / "task" / "lnk").symlink_to("a,src=/,consistency=default")
    (tmp_path / "task" / "out").symlink_to("/etc")
    path = folder_of(tmp_path / "task", f"services:\n  main: {{}}\n  db:\n{image}    {service}\n")
    with pytest.raises(TaskError) as caught:
        read_compose(path, "main")
    assert message in str(caught.value)
    assert str(caught.value).startswith(("docker-compose.yaml", "[", "services"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("services: {main: {command: /start.sh}}", "services.main.command is not supported"),
        ("services: {main: {entrypoint: x}}", "services.main.entrypoint is not supported"),
        (
            "services: {main: {depends_on: {a: {condition: service_healthy}}}, a: {image: x}}",
            "no healthcheck",
        ),
        ("services: {main: {volumes: ['./a:/b:ro']}}", "services.main.volumes: './a:/b:ro' is not supported"),
        ("services: {a: {}}", "service a has neither image nor build"),
        ("services: {a b: {image: x}}", "'a b' is no name of a service"),
        ("services: []", "services is not a mapping"),
        ("secrets: {}", "secrets is not supported"),
        ("volumes: {a: {driver: nfs}}", "volumes.a is not supported"),
        (
            "services: {" + ", ".join(f"s{n}: {{image: x}}" for n in range(9)) + "}",
            "more than 8 services beside the agent's",
        ),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TaskError) as caught:
        read_compose(folder_of(tmp_path, text), "main")
    assert message in str(caught.value)


def test_durations() -> None:
    assert [seconds(text, 7.0) for text in ("1m30s", "500ms", "2h", None)] == [90.0, 0.5, 7200.0, 7.0]
