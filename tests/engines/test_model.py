"""The model against transformers, which did not write it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from insitu.errors import EngineError
from insitu_train.embedded.architecture import ModelConfig
from insitu_train.embedded.model import Qwen3, initialise, load_model, save_model

pytestmark = [pytest.mark.numeric, pytest.mark.slow]

CONFIGS = {
    "tied": ModelConfig(
        vocab_size=97, hidden_size=48, head_dim=16, intermediate_size=80, num_hidden_layers=2
    ),
    "untied": ModelConfig(vocab_size=64, hidden_size=32, head_dim=8, tie_word_embeddings=False),
    "rope": ModelConfig(vocab_size=64, num_hidden_layers=2, rope_theta=1_000_000.0),
    "mha": ModelConfig(vocab_size=64, num_attention_heads=4, num_key_value_heads=4, rms_norm_eps=1e-5),
    "one-kv-head": ModelConfig(vocab_size=64, num_key_value_heads=1, max_position_embeddings=256),
}


def lively(config: ModelConfig) -> Qwen3:
    """A model whose norms and attention matter: large matrices, norm weights away from one."""
    model = initialise(config, 3)
    noise = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p * 5 if p.ndim > 1 else p + 0.3 * torch.randn(p.shape, generator=noise))
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_forward_equals_transformers(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    model = lively(config)
    save_model(model, tmp_path)
    theirs = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    ids = torch.randint(0, config.vocab_size, (3, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = theirs(ids).logits
        alone = model.logits(model.hidden(ids[0, :0], ids))
        ids[:, :11] = ids[0, :11]
        shared_wanted = theirs(ids).logits[:, 11:]
        shared = model.logits(model.hidden(ids[0, :11], ids[:, 11:]))
    assert wanted.abs().max() > 1
    assert torch.allclose(alone, wanted, atol=2e-5, rtol=1e-5)
    assert torch.allclose(shared, shared_wanted, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_saved_model_comes_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    model = lively(CONFIGS[name])
    save_model(model, tmp_path)
    again = load_model(tmp_path)
    assert again.config == model.config
    for (n, a), (m, b) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
        assert n == m
        assert torch.equal(a, b)


def test_rope_theta_is_written_where_both_generations_of_transformers_look(tmp_path: Path) -> None:
    save_model(initialise(CONFIGS["rope"], 0), tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["rope_theta"] == raw["rope_parameters"]["rope_theta"] == 1_000_000.0
    assert transformers.AutoConfig.from_pretrained(tmp_path).rope_parameters["rope_theta"] == 1_000_000.0


def test_gradients_flow_through_the_shared_prefix() -> None:
    model = lively(CONFIGS["tied"])
    ids = torch.randint(0, 97, (2, 30), generator=torch.Generator().manual_seed(0))
    ids[:, :12] = ids[0, :12]
    gradients = []
    for cut in (0, 12):
        model.zero_grad()
        hidden = model.hidden(ids[0, :cut], ids[:, cut:])[:, 12 - cut :]
        model.logits(hidden).log_softmax(-1)[..., 5].sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for a, b in zip(*gradients, strict=True):
        assert torch.allclose(a, b, atol=1e-4, rtol=1e-4)


def test_a_folder_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="load model"):
        load_model(tmp_path)
    save_model(initialise(CONFIGS["tied"], 0), tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "num_hidden_layers": 3}))
    with pytest.raises(EngineError, match="does not fit"):
        load_model(tmp_path)
