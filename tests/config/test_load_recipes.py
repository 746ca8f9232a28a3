"""The recipes of docs/recipes.md on a machine without GPU and weights: a model's config.json is enough.

The page shows what `insitu train FILE --dry-run` prints there.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from insitu import cli
from insitu.config import load_config

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "recipes.md").read_text()
SHOWN = re.findall(r"<!-- dry run of (\S+) (\S+) -->\n```\n(.*?)\n```", PAGE, re.DOTALL)
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "hidden_act": "silu", "dtype": "bfloat16",
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-1.7B": {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
    },
    "Qwen3-4B": {
        "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
        "max_position_embeddings": 262144,
    },
    "Qwen3-8B": {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
"""As the published models say in their config.json."""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, shape in SHAPES.items():
        folder = tmp_path / "models" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({**QWEN3, **shape}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


def dry(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """The lines after the configuration."""
    assert cli.main(["train", *options, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert load_config(base=tomllib.loads(out))
    return "\n".join(re.findall(r"^# ((?:learner|server \d|memory): .*)$", out, re.MULTILINE))


def test_the_page_has_each_recipe() -> None:
    assert [name for name, _, _ in SHOWN] == [
        f"examples/{name}.toml" for name in ("one-24gb", "one-80gb", "eight-80gb")
    ]


@pytest.mark.parametrize(
    ("file", "memory", "shown"),
    [pytest.param(*each, marks=pytest.mark.full if i else (), id=each[0]) for i, each in enumerate(SHOWN)],
)
def test_a_recipe_is_placed_and_fits(
    models: Path, capsys: pytest.CaptureFixture[str], file: str, memory: str, shown: str
) -> None:
    assert dry(capsys, str(ROOT / file), memory) == shown
    assert "does not fit" not in shown


@pytest.mark.full
def test_what_does_not_fit_is_said(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = dry(capsys, str(ROOT / "examples/one-24gb.toml"), "policy.memory_gib=4")
    assert re.search(r"with all memory options, of 4.0 GiB: it does not fit", said)


@pytest.mark.full
def test_without_a_limit_it_says_what_memory_options_are_worth(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = dry(capsys, str(ROOT / "examples/one-24gb.toml"))
    assert re.search(r"takes [\d.]+ GiB plain, [\d.]+ GiB checkpoint \+ save_attention, [\d.]+ GiB", said)


@pytest.mark.parametrize("text", ["{", '{"model_type": "no-such-model"}'])
def test_a_folder_of_no_model_gets_one_line(
    models: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (models / "models" / "Qwen3-1.7B" / "config.json").write_text(text)
    said = dry(capsys, str(ROOT / "examples/one-24gb.toml")).splitlines()
    assert len([line for line in said if line.startswith("memory: not predicted: ")]) == 1


def test_nothing_is_predicted_without_the_models_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    said = dry(capsys, str(ROOT / "examples/one-24gb.toml"))
    assert "memory: not predicted: models/Qwen3-1.7B has no config.json here" in said
