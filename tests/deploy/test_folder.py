"""`insitu deploy`: what is written for each target, what is refused, and the start script run for real."""

from __future__ import annotations

import re
import runpy
import subprocess
from functools import partial
from pathlib import Path

import pytest
import yaml

from insitu.cli import main
from insitu.errors import ConfigError, SetupError
from insitu_fleet.deploy.folder import TARGETS, DeployOptions, Target, deploy
from tests.fakes.hub import fake_hub

CONFIG = """
[model]
path = "models/qwen"
max_context_tokens = 8192
[engine]
kind = "vllm"
urls = ["http://127.0.0.1:8000"]
key_env = "ENGINE_KEY"
[policy]
kind = "hf"
lora_rank = 16
[run]
hub = "me/run"
[track]
to = ["wandb"]
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(CONFIG)
    return path


def made(target: Target, config: Path, nodes: int = 1, gpus: int = 0) -> Path:
    out = config.parent / target
    deploy(DeployOptions(target=target, config=config, out=out, nodes=nodes, gpus=gpus))
    return out


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("gpus", [0, 2])
def test_a_folder_is_complete_and_holds_no_secret(
    target: Target, gpus: int, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_TOKEN", "ENGINE_KEY", "WANDB_API_KEY"):
        monkeypatch.setenv(name, "s3cr3t-value")
    out = made(target, config, gpus=gpus)
    texts = {path.name: path.read_text() for path in out.rglob("*") if path.is_file()}
    assert not [name for name, text in texts.items() if re.search(r"@[A-Z_]+@|s3cr3t|hf\.space", text)]
    assert texts["insitu.toml"] == CONFIG
    docker = texts["Dockerfile"]
    assert docker.index("COPY --chown") < docker.index("\nUSER 1000\n") < docker.index("\nHEALTHCHECK ")
    assert re.search(r"^CMD .*start.sh", docker, re.MULTILINE)
    for source in re.findall(r"^COPY (?:--\S+ )?(\S+) ", docker, re.MULTILINE):
        assert (out / source).exists(), source
    assert ("vllm/vllm-openai" in docker) == bool(gpus)
    compose = yaml.safe_load(texts["compose.yaml"])["services"]["insitu"]
    assert compose["environment"] == ["ENGINE_KEY", "HF_TOKEN", "WANDB_API_KEY"]
    assert "vllm serve models/qwen --host 127.0.0.1 --port 8000 " in texts["start.sh"]
    assert " --max-model-len 8192 --logprobs-mode processed_logprobs --enable-scale-out" in texts["start.sh"]
    assert ("VLLM_TARGET_DEVICE=cpu" in texts["start.sh"]) == (not gpus)
    assert "--max-lora-rank 16" in texts["start.sh"]
    for script in ("start.sh", "job.sbatch"):
        if script in texts:
            done = subprocess.run(["bash", "-n", out / script], capture_output=True, check=False)
            assert (done.returncode, done.stderr) == (0, b"")


def test_each_target_has_its_file(config: Path) -> None:
    head = made("space", config, gpus=4) / "README.md"
    front = yaml.safe_load(head.read_text().split("---")[1])
    assert (front["sdk"], front["app_port"], front["suggested_hardware"]) == ("docker", 7860, "a10g-largex4")
    script = (made("slurm", config, nodes=4, gpus=8) / "job.sbatch").read_text()
    assert "#SBATCH --nodes=4\n" in script
    assert "#SBATCH --gpus-per-node=8\n" in script
    claim, job = yaml.safe_load_all((made("k8s", config, gpus=2) / "job.yaml").read_text())
    assert (claim["kind"], job["kind"], job["spec"]["backoffLimit"]) == ("PersistentVolumeClaim", "Job", 0)
    [container] = job["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "2"


def test_bad_input_is_one_line_and_writes_nothing(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for changes, said in (
        ({"nodes": 2, "target": "k8s"}, "runs on one machine"),
        ({"name": "My Job"}, "lower-case"),
        ({"gpus": -1}, "--gpus"),
        ({"config": tmp_path / "none.toml"}, "cannot read"),
    ):
        options = {"target": "slurm", "config": config, "out": out} | changes
        with pytest.raises(ConfigError, match=said):
            deploy(DeployOptions(**options))
        assert not out.exists()
    out.mkdir()
    (out / "mine").write_text("x")
    with pytest.raises(SetupError, match="is not empty"):
        deploy(DeployOptions(target="k8s", config=config, out=out))


def test_the_command_says_what_to_add(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", "slurm", str(config), "--out", str(config.parent / "job")]) == 0
    said = capsys.readouterr().out
    assert "before use: model.path: copy models/qwen there" in said
    config.write_text(config.read_text().replace('"models/qwen"', '"hub:me/qwen"'))
    assert main(["deploy", "slurm", str(config), "--out", str(config.parent / "named")]) == 0
    named = capsys.readouterr().out
    assert "HF_TOKEN" in named
    assert "model.path" not in named, "what has a name at a hub is fetched there"
    assert "before use: set HF_TOKEN where it runs" in said


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Use 'content:DeprecationWarning")
def test_the_folder_of_a_space_is_pushed_by_its_script(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from huggingface_hub import HfApi, constants

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    out = made("space", config, gpus=2)
    (out / "runs").mkdir()
    (out / "runs" / "store").write_text("rollouts")

    def push(*arguments: str) -> str:
        monkeypatch.setattr("sys.argv", ["push.py", *arguments])
        runpy.run_path(str(out / "push.py"), run_name="__main__")
        return capsys.readouterr().out.strip()

    with fake_hub() as hub:
        monkeypatch.setattr("huggingface_hub.HfApi", partial(HfApi, endpoint=hub.url, token="hf_write"))
        with pytest.raises(SystemExit, match=r"^push: not set here: ENGINE_KEY, HF_TOKEN, WANDB_API_KEY$"):
            push("me/train", "--secrets")
        with pytest.raises(SystemExit, match=r"^push: a Space is named ORG/NAME, not train$"):
            push("train")
        assert hub.requests == []
        for name in ("ENGINE_KEY", "HF_TOKEN", "WANDB_API_KEY"):
            monkeypatch.setenv(name, f"the {name}")
        assert push("me/train", "--hardware", "a10g-largex2", "--secrets") == f"{hub.url}/spaces/me/train"
        assert (hub.repos["me/train"]["type"], hub.repos["me/train"]["sdk"]) == ("space", "docker")
        assert hub.repos["me/train"]["visibility"] == "private"
        assert (hub.space["hardware"], hub.space["WANDB_API_KEY"]) == ("a10g-largex2", "the WANDB_API_KEY")
        assert hub.tokens == {"Bearer hf_write"}
        wanted = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
        assert set(hub.files) == wanted - {"push.py", "runs/store"}
        hub.fail = [403]
        with pytest.raises(SystemExit, match=r"^push: .*403"):
            push("me/train")
