"""What a wheel holds beside the code, and the install hints."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

from insitu import install_hints as hints
from insitu.config import load_config
from insitu.config.load import EXAMPLES
from insitu.errors import ConfigError

ROOT = Path(__file__).parents[2]


def hook() -> object:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_of_the_readme_lead_somewhere_on_an_index() -> None:
    for_index = vars(hook())["for_index"]
    readme = "![A](docs/a.svg) [b](b.md), [c](https://c) [d](#d)"
    assert for_index(readme) == " b, [c](https://c) [d](#d)"
    assert for_index(readme, "https://host/p/") == (
        "![A](https://host/p/raw/main/docs/a.svg) [b](https://host/p/blob/main/b.md), [c](https://c) [d](#d)"
    )


@pytest.mark.slow
def test_a_wheel_has_the_examples_and_a_readme_without_dead_links(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as held:
        names = set(held.namelist())
        for example in (ROOT / "examples").glob("*.toml"):
            assert held.read(f"{hints.NAME}/examples/{example.name}") == example.read_bytes()
        metadata = next(name for name in names if name.endswith("/METADATA"))
        text = held.read(metadata).decode()
    assert "](docs/" not in text
    assert "](examples/" not in text
    assert "Classifier: " in text
    assert f"{hints.NAME}/py.typed" in names


def test_an_example_is_found_where_there_is_no_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config(Path("examples/demo.toml")) == load_config(EXAMPLES / "demo.toml")
    with pytest.raises(ConfigError, match="cannot read examples/other.toml"):
        load_config(Path("examples/other.toml"))
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "demo.toml").write_text("[run]\nsteps = 3\n")
    assert load_config(Path("examples/demo.toml")).run.steps == 3, "a file of one's own comes first"


@pytest.mark.parametrize(
    ("file", "text", "extra", "package"),
    [
        ("pipx_metadata.json", "{}", "pipx install --force 'insitu[train]'", "pipx inject insitu nodejs"),
        ("uv-receipt.toml", "", "uv tool install 'insitu[train]'", "uv tool install insitu --with nodejs"),
        (
            "pyvenv.cfg",
            "home = /usr\nuv = 0.9.5\n",
            "uv pip install 'insitu[train]'",
            "uv pip install nodejs",
        ),
        ("pyvenv.cfg", "home = /usr/uv\n", "pip install 'insitu[train]'", "pip install nodejs"),
    ],
)
def test_hints_are_in_the_words_of_the_installer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, text: str, extra: str, package: str
) -> None:
    (tmp_path / file).write_text(text)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(hints, "_editable", lambda: "")
    assert hints.install_extra("train") == extra.replace("insitu", hints.NAME)
    assert hints.install_package("nodejs") == package.replace("insitu", hints.NAME)


def test_an_editable_install_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / f"{hints.NAME}-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {hints.NAME}\nVersion: 0\n")
    origin = {"url": "file:///a%20folder/it", "dir_info": {"editable": True}}
    (info / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "prefix", os.devnull)
    assert distribution(hints.NAME).version == "0"
    assert hints.install_extra("hf") == (
        "cd '/a folder/it' && pip install -e '.[hf]' -r requirements/packages.txt"
    )
