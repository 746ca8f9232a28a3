"""A model of transformers behind the policy protocol: the numbers of the embedded Qwen3 on the same weights,
with and without each memory technique, and a refusal of what it cannot compute."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from rounding import apart, rounding
from safetensors.torch import load_file, save_file
from train_lab import sampled_groups, small_model
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3ForCausalLM

from insitu.errors import TrainError
from insitu_train.embedded.model import Qwen3, save_model
from insitu_train.model.base import MemoryOptions, Policy
from insitu_train.model.hf import HfPolicy, adopt, open_hf
from insitu_train.options import Lora, OptimConfig, TrainConfig
from insitu_train.plan.step import PlanConfig, StepPlan, plan_step
from insitu_train.trainer import checkpoint
from insitu_train.trainer.trainer import Trainer

pytestmark = [pytest.mark.numeric, pytest.mark.slow]

CPU = torch.device("cpu")
TINY = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 256,
}  # fmt: skip


def opened(
    folder: Path, *, limit: float = 1e-4, dtype: torch.dtype = torch.float32, lora: Lora | None = None
) -> HfPolicy:
    return open_hf(folder, device=CPU, dtype=dtype, limit=limit, lora=lora)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Qwen3, HfPolicy]:
    model = small_model(1)
    save_model(model, tmp_path / "model")
    return model, opened(tmp_path / "model")


def a_plan(token_budget: int = 100) -> StepPlan:
    return plan_step(sampled_groups(small_model(0)), PlanConfig(token_budget=token_budget))


def gradients(model: Policy, plan: StepPlan) -> tuple[float, dict[str, torch.Tensor]]:
    trainer = Trainer(model, TrainConfig())
    trainer.fit = None
    loss = trainer.gradients(plan)
    return loss, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def relative(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Largest difference of any tensor, against that tensor's own largest entry."""
    assert found.keys() == expected.keys()
    return max(float((found[n] - g).abs().max() / g.abs().max()) for n, g in expected.items())


@pytest.mark.parametrize("token_budget", [1, 100, 100000])
def test_loss_and_gradients_are_the_embedded_models(pair: tuple[Qwen3, HfPolicy], token_budget: int) -> None:
    plan = a_plan(token_budget)
    ours, theirs = gradients(pair[0], plan), gradients(pair[1], plan)
    loss_may, may = rounding(lambda model: gradients(model, plan), pair[0])
    assert max(loss_may, *may.values()) < 1e-3
    assert abs(theirs[0] - ours[0]) <= 2 * loss_may
    assert theirs[1].keys() == ours[1].keys()
    assert all(apart(theirs[1][n], g) <= 2 * may[n] for n, g in ours[1].items())


@pytest.mark.parametrize(
    "techniques",
    [
        pytest.param(MemoryOptions(checkpoint=True), marks=pytest.mark.full),
        pytest.param(MemoryOptions(checkpoint=True, save_attention=True), marks=pytest.mark.full),
        pytest.param(MemoryOptions(tile_mlp=7), marks=pytest.mark.full),
        MemoryOptions(checkpoint=True, save_attention=True, tile_mlp=16, offload_activations=True),
    ],
    ids=str,
)
def test_a_technique_changes_no_gradient(pair: tuple[Qwen3, HfPolicy], techniques: MemoryOptions) -> None:
    policy, plan = pair[1], a_plan()
    plain = gradients(policy, plan)
    policy.techniques = techniques
    found = gradients(policy, plan)
    if not techniques.tile_mlp:
        assert found[0] == plain[0]
        assert relative(found[1], plain[1]) == 0.0
        return
    # tiles add up in another order
    loss_may, may = rounding(lambda model: gradients(model, plan), pair[0])
    assert abs(found[0] - plain[0]) <= 2 * loss_may
    assert all(apart(found[1][n], g) <= 2 * may[n] for n, g in plain[1].items())


def trained(policy: Policy) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in policy.named_parameters() if p.requires_grad}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


LORA = Lora(rank=3, alpha=6.0, targets=("q_proj", "v_proj", "down_proj"))
LOOSE = TrainConfig(optim=OptimConfig(lr=1e-3), threads=1, max_logprob_gap=10.0, max_staleness=9)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_a_resumed_run_has_the_same_bits(tmp_path: Path, lora: Lora | None) -> None:
    save_model(small_model(1), tmp_path / "model")
    plan = a_plan()
    straight = Trainer(opened(tmp_path / "model", lora=lora), LOOSE)
    straight.step(plan)
    checkpoint.save(straight, tmp_path / "checkpoint", tmp_path / "model")
    resumed = Trainer(opened(tmp_path / "model", lora=lora), LOOSE)
    checkpoint.load(resumed, tmp_path / "checkpoint")
    before = trained(resumed.model)
    assert straight.step(plan).loss == resumed.step(plan).loss
    assert equal(trained(straight.model), trained(resumed.model))
    assert not equal(before, trained(resumed.model))


def test_a_checkpoint_loads_in_transformers(pair: tuple[Qwen3, HfPolicy], tmp_path: Path) -> None:
    trainer = Trainer(pair[1], LOOSE)
    trainer.step(a_plan())
    checkpoint.save(trainer, tmp_path / "out", tmp_path / "model")
    again = Qwen3ForCausalLM.from_pretrained(tmp_path / "out")
    assert equal(dict(again.named_parameters()), trained(pair[1]))
    assert "insitu" not in (tmp_path / "out" / "config.json").read_text()


def test_adapters_start_as_nothing_and_are_all_that_is_trained(
    pair: tuple[Qwen3, HfPolicy], tmp_path: Path
) -> None:
    plan, policy = a_plan(), opened(tmp_path / "model", lora=LORA)
    plain = gradients(pair[1], plan)
    assert gradients(policy, plan)[0] == plain[0]
    trainer = Trainer(policy, LOOSE)
    frozen = {n: p.clone() for n, p in policy.named_parameters() if not p.requires_grad}
    trainer.step(plan)
    assert len(trained(policy)) == 2 * 3 * 2
    assert equal(frozen, {n: p for n, p in policy.named_parameters() if not p.requires_grad})
    assert all(bool(t.any()) for n, t in trained(policy).items() if n.endswith("lora_B"))


def test_adapters_equal_a_merged_matrix(pair: tuple[Qwen3, HfPolicy], tmp_path: Path) -> None:
    policy = opened(tmp_path / "model", lora=LORA)
    Trainer(policy, LOOSE).step(a_plan())
    held = dict(policy.published())
    merged = pair[1]
    with torch.no_grad():
        for name, p in merged.named_parameters():
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            if f"{stem}.lora_A.weight" in held:
                p.add_(2.0 * held[f"{stem}.lora_B.weight"] @ held[f"{stem}.lora_A.weight"])
    a, b = Trainer(policy, LOOSE).logprobs(a_plan()), Trainer(merged, LOOSE).logprobs(a_plan())
    assert max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True)) < 1e-5


def test_bf16_computes_in_bf16_and_keeps_fp32(tmp_path: Path) -> None:
    save_model(small_model(1, scale=1.0), tmp_path / "model")
    exact = gradients(opened(tmp_path / "model"), a_plan())
    policy = opened(tmp_path / "model", dtype=torch.bfloat16)
    rough = gradients(policy, a_plan())
    assert {g.dtype for g in rough[1].values()} == {torch.float32}
    error = max(float((rough[1][n] - g).norm() / g.norm()) for n, g in exact[1].items())
    assert 1e-4 < error < 0.05
    policy.techniques = MemoryOptions(checkpoint=True, save_attention=True)
    again = gradients(policy, a_plan())
    assert equal(again[1], rough[1])


def test_other_architectures_train_with_the_same_code(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, rope_theta=1000.0,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    policy = opened(tmp_path / "llama")
    before = trained(policy)
    assert not Trainer(policy, LOOSE).step(a_plan()).skipped
    after = trained(policy)
    assert all(not torch.equal(after[n], p) for n, p in before.items())


def test_a_folder_without_a_causal_model_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(TrainError, match="not a causal language model"):
        opened(tmp_path)


def test_the_proof_runs_where_the_policy_will(tmp_path: Path) -> None:
    save_model(small_model(1), tmp_path / "model")
    model = Qwen3ForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager")
    seen, move = [], model.to
    model.to = lambda device: (seen.append("moved"), move(device))[1]
    model.register_forward_pre_hook(lambda *given: seen.append("computed"))
    adopt(model, device=CPU, dtype=torch.float32)
    assert seen[0] == "moved"
    assert set(seen[1:]) == {"computed"}


def test_what_is_missing_is_named_with_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        TrainError, match=r"^policy.kind hf needs transformers: (cd .* && )?(uv )?pip install"
    ):
        opened(tmp_path)


def test_a_folder_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    """transformers would open it with random ones in their place."""
    model = LlamaForCausalLM(LlamaConfig(**TINY))
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    shards = sorted((tmp_path / "shards").glob("model-*.safetensors"))
    assert len(shards) > 2
    shards[1].unlink()
    with pytest.raises(TrainError, match=rf"No such file or directory: .*{shards[1].name}"):
        open_hf(tmp_path / "shards", device=CPU, dtype=torch.float32)
    model.save_pretrained(tmp_path / "whole")
    file = tmp_path / "whole" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.0.self_attn.q_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(TrainError, match=r"lacks 1 tensors of LlamaForCausalLM, first .*q_proj.*download"):
        open_hf(tmp_path / "whole", device=CPU, dtype=torch.float32)


def test_a_full_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LlamaForCausalLM(LlamaConfig(**TINY))

    def full(device: torch.device) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")

    monkeypatch.setattr(model, "to", full)
    with pytest.raises(
        TrainError, match=r"cpu is full: opening LlamaForCausalLM takes .* choose another GPU"
    ):
        adopt(model, device=CPU, dtype=torch.float32)
