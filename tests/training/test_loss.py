"""Losses, corrections and divergences against slow references: plain Python in double precision, written from
the papers' formulas, one rollout at a time, with old != new."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import pytest
import torch

from insitu.config.training import LossConfig
from insitu.errors import TrainError
from insitu_train.loss.losses import LossInputs, TokenLoss, divergence, token_loss

# Unmarked as slow: `scripts/test --fast` guards the signs of the losses too.
pytestmark = [pytest.mark.numeric]

log, exp = math.log, math.exp


@dataclasses.dataclass
class RolloutCase:
    """One rollout: what is known of its tokens, and its advantage."""

    live: list[float]
    mu: list[float]
    prox: list[float]
    ref: list[float]
    a: float


def rollouts() -> list[RolloutCase]:
    """Three tokens each, with ratios on both sides of every bound and both signs of advantage."""
    p = (0.02, 0.15, 0.3, 0.55, 0.95)
    chances = list(product(p, p))
    made = []
    for i, a in enumerate((-1.5, -0.25, 0.5, 2.0) * 12):
        picked = [chances[(7 * i + 11 * k) % len(chances)] for k in range(3)]
        made.append(
            RolloutCase(
                live=[log(x) for x, _ in picked],
                mu=[log(y) for _, y in picked],
                prox=[log((2 * x + y) / 3 + 0.04 * (k - 1) * x) for k, (x, y) in enumerate(picked)],
                ref=[log((x + 3 * y) / 4) for x, y in picked],
                a=a,
            )
        )
    # Rollouts as a whole hardly moved, for bounds as narrow as gspo's.
    for d in (-6e-4, -1e-4, 2e-4, 7e-4):
        live = [log(0.2), log(0.5), log(0.7)]
        old = [x - d for x in live]
        made += [
            RolloutCase(live=live, mu=old, prox=[x - d / 2 for x in live], ref=old, a=a) for a in (-1.0, 1.0)
        ]
    for q, a in ((0.02, 1.0), (0.9, -1.0)):
        prox = [log(0.2), log(0.3), log(0.4)]
        made.append(RolloutCase(live=[x + 0.1 for x in prox], mu=[log(q)] * 3, prox=prox, ref=prox, a=a))
    return made


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def terms(cases: Sequence[RolloutCase], config: LossConfig) -> tuple[torch.Tensor, LossInputs]:
    """All tokens in one row, with what holds for a whole rollout given to each of them."""

    def flat(name: str) -> torch.Tensor:
        return torch.tensor([x for t in cases for x in getattr(t, name)], dtype=torch.float64)

    def spread(value: Callable[[RolloutCase], float]) -> torch.Tensor:
        return torch.tensor([value(t) for t in cases for _ in t.live], dtype=torch.float64)

    def apart(t: RolloutCase) -> float:
        d = [x - y for x, y in zip(t.prox, t.mu, strict=True)]
        return sum(d) if config.correction_level == "rollout" else mean(d)

    return flat("live").requires_grad_(), LossInputs(
        mu=flat("mu"),
        advantage=spread(lambda t: t.a),
        prox=flat("prox"),
        ref=flat("ref"),
        live_mu=spread(lambda t: mean([x - y for x, y in zip(t.live, t.mu, strict=True)])),
        live_prox=spread(lambda t: mean([x - y for x, y in zip(t.live, t.prox, strict=True)])),
        prox_mu=spread(apart),
    )


def run(cases: Sequence[RolloutCase], config: LossConfig) -> tuple[list[float], list[float], TokenLoss]:
    """Loss and slope of every token, and all that was said of them."""
    logp, given = terms(cases, config)
    out = token_loss(logp, given, config)
    out.loss.sum().backward()
    assert logp.grad is not None
    return out.loss.tolist(), logp.grad.tolist(), out


Pair = tuple[float, float]
"""Loss and slope with respect to the token's own live logp."""


def clipped(ratio: float, a: float, low: float, high: float, dual: float = 0.0) -> Pair:
    inside = min(max(ratio, 1 - low), 1 + high)
    value, slope = min((ratio * a, ratio * a), (inside * a, 0.0), key=lambda v: v[0])
    if dual and a < 0 and value < dual * a:
        value, slope = dual * a, 0.0
    return -value, -slope


def dppo(t: RolloutCase, k: int) -> Pair:
    rho, p, q = exp(t.live[k] - t.mu[k]), exp(t.live[k]), exp(t.mu[k])
    kept = not ((t.a > 0 and p - q > 0.2) or (t.a < 0 and p - q < -0.2))
    return (-rho * t.a, -rho * t.a) if kept else (0.0, 0.0)


def old_of(t: RolloutCase, ratio: str) -> list[float]:
    return t.mu if ratio == "sampler" else t.prox


def ppo(t: RolloutCase, k: int, ratio: str, dual: float = 0.0) -> Pair:
    return clipped(exp(t.live[k] - old_of(t, ratio)[k]), t.a, 0.2, 0.28, dual)


def cispo(t: RolloutCase, k: int, ratio: str) -> Pair:
    factor = -min(exp(t.live[k] - old_of(t, ratio)[k]), 5.0) * t.a
    return factor * t.live[k], factor


def gspo(t: RolloutCase, k: int, ratio: str) -> Pair:
    s = exp(mean([x - y for x, y in zip(t.live, old_of(t, ratio), strict=True)]))
    return clipped(s, t.a, 3e-4, 4e-4)


def decoupled(t: RolloutCase, k: int) -> Pair:
    w = exp(t.prox[k] - t.mu[k])
    value, slope = clipped(exp(t.live[k] - t.prox[k]), t.a, 0.2, 0.28)
    return w * value, w * slope


def pulled(pair: Pair, t: RolloutCase, k: int) -> Pair:
    d = t.live[k] - t.mu[k]
    return pair[0] + 1e-3 * d * d, pair[1] + 2e-3 * d


LOSSES: dict[str, tuple[LossConfig, Callable[[RolloutCase, int], Pair]]] = {
    "dppo": (LossConfig(), lambda t, k: pulled(dppo(t, k), t, k)),
    "ppo_clip": (LossConfig(loss="ppo_clip"), lambda t, k: ppo(t, k, "sampler")),
    "ppo_clip_trainer": (LossConfig(loss="ppo_clip", ratio="trainer"), lambda t, k: ppo(t, k, "trainer")),
    "dual_clip": (LossConfig(loss="ppo_clip", dual_clip=3.0), lambda t, k: ppo(t, k, "sampler", 3.0)),
    "cispo": (LossConfig(loss="cispo"), lambda t, k: cispo(t, k, "sampler")),
    "cispo_trainer": (LossConfig(loss="cispo", ratio="trainer"), lambda t, k: cispo(t, k, "trainer")),
    "gspo": (LossConfig(loss="gspo"), lambda t, k: gspo(t, k, "sampler")),
    "gspo_trainer": (LossConfig(loss="gspo", ratio="trainer"), lambda t, k: gspo(t, k, "trainer")),
    "decoupled": (LossConfig(loss="decoupled"), decoupled),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_slope_equal_the_formula(name: str) -> None:
    config, formula = LOSSES[name]
    cases = rollouts()
    expected = [formula(t, k) for t in cases for k in range(3)]
    loss, slope, out = run(cases, config)
    assert loss == pytest.approx([v for v, _ in expected], rel=1e-9, abs=1e-12)
    assert slope == pytest.approx([s for _, s in expected], rel=1e-9, abs=1e-12)
    if not name.startswith("cispo_t"):
        assert 0 < int(out.cut.sum()) < len(loss)


def test_the_gradient_of_gspo_is_that_of_the_rollouts_own_ratio() -> None:
    """Each token carries one n-th: the sum over tokens / n is the paper's loss of one sequence."""
    config = LossConfig(loss="gspo", ratio="trainer", clip=(0.2, 0.3))
    for t in rollouts():
        live = torch.tensor(t.live, dtype=torch.float64, requires_grad=True)
        s = (live - torch.tensor(t.prox, dtype=torch.float64)).mean().exp()
        whole = -torch.minimum(s * t.a, s.clamp(0.8, 1.3) * t.a)
        (expected,) = torch.autograd.grad(whole, live)
        loss, slope, _ = run([t], config)
        assert mean(loss) == pytest.approx(float(whole.detach()))
        assert [x / 3 for x in slope] == pytest.approx(expected.tolist())


def weigh(t: RolloutCase, k: int, kind: str, level: str) -> float:
    d = [x - y for x, y in zip(t.prox, t.mu, strict=True)]
    w = exp({"token": d[k], "rollout": sum(d), "rollout_mean": mean(d)}[level])
    high = {"tis": 2.0, "mask": 3.0, "icepop": 5.0}[kind]
    if kind == "tis":
        return min(w, high)
    return w if w <= high and not (kind == "icepop" and w < 0.5) else 0.0


@pytest.mark.parametrize("level", ["token", "rollout", "rollout_mean"])
@pytest.mark.parametrize("kind", ["tis", "mask", "icepop"])
@pytest.mark.parametrize("name", ["ppo_clip", "cispo", "gspo", "decoupled"])
def test_a_correction_multiplies_the_policy_term(name: str, kind: str, level: str) -> None:
    config = LossConfig(loss=name, ratio="trainer", correction=kind, correction_level=level)  # type: ignore[arg-type]
    formulas = {"ppo_clip": ppo, "cispo": cispo, "gspo": gspo, "decoupled": ppo}
    cases = rollouts()
    expected = []
    for t in cases:
        for k in range(3):
            value, slope = formulas[name](t, k, "trainer")
            w = weigh(t, k, kind, level)
            expected.append((w * value, w * slope))
    loss, slope, out = run(cases, config)
    assert loss == pytest.approx([v for v, _ in expected], rel=1e-9, abs=1e-12)
    assert slope == pytest.approx([s for _, s in expected], rel=1e-9, abs=1e-12)
    assert out.corrected is not None
    assert 0 < int(out.corrected.sum()) < len(loss)


def test_bounds_of_a_correction_are_the_ones_asked_for() -> None:
    t = RolloutCase(
        live=[0.0] * 3, mu=[-1.0] * 3, prox=[log(0.3) - 1, log(0.9) - 1, log(1.4) - 1], ref=[0.0] * 3, a=1.0
    )
    config = LossConfig(loss="cispo", ratio="trainer", correction="icepop", correction_bounds=(0.4, 1.2))
    assert run([t], config)[2].corrected.tolist() == [True, False, True]  # type: ignore[union-attr]
    one_side = config.changed(correction="mask", correction_bounds=(0.0, 1.2))
    assert run([t], one_side)[2].corrected.tolist() == [False, False, True]  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["dppo", "ppo_clip", "gspo"])
def test_opsm_leaves_out_what_moved_away_with_a_negative_advantage(name: str) -> None:
    plain = LossConfig(loss=name)  # type: ignore[arg-type]
    masked = plain.changed(off_policy_mask=0.1)
    cases = rollouts()
    formula = {
        "dppo": dppo,
        "ppo_clip": lambda t, k: ppo(t, k, "sampler"),
        "gspo": lambda t, k: gspo(t, k, "sampler"),
    }
    expected, left = [], 0
    for t in cases:
        gone = t.a < 0 and mean([m - x for x, m in zip(t.live, t.mu, strict=True)]) > 0.1
        left += 3 * gone
        for k in range(3):
            pair = (0.0, 0.0) if gone else formula[name](t, k)
            expected.append(pulled(pair, t, k) if name == "dppo" else pair)
    loss, slope, out = run(cases, masked)
    assert loss == pytest.approx([v for v, _ in expected], rel=1e-9, abs=1e-12)
    assert slope == pytest.approx([s for _, s in expected], rel=1e-9, abs=1e-12)
    assert out.corrected is not None
    assert 0 < left == int(out.corrected.sum()) < len(loss)


@pytest.mark.parametrize("unbiased", [True, False])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("name", ["dppo", "ppo_clip_trainer"])
def test_the_pull_to_a_reference(name: str, kind: str, unbiased: bool) -> None:
    base, formula = LOSSES[name]
    if kind == "k1" and not unbiased:
        with pytest.raises(ValueError, match="kl = 'k1' needs kl_unbiased"):
            LossConfig(kl="k1", kl_unbiased=False)
        return
    config = base.changed(kl=kind, kl_weight=0.3, kl_unbiased=unbiased)  # type: ignore[arg-type]
    cases = rollouts()
    expected, kls = [], []
    for t in cases:
        for k in range(3):
            d = t.live[k] - t.ref[k]
            value, rise = {"k1": (d, 1.0), "k2": (d * d / 2, d), "k3": (exp(-d) - 1 + d, 1 - exp(-d))}[kind]
            r = exp(t.live[k] - (t.mu if name == "dppo" else t.prox)[k]) if unbiased else 1.0
            # The ratio's own slope is r; k2 has its slope already.
            slope = r * rise + (r * value if unbiased and kind != "k2" else 0.0)
            pair = formula(t, k)
            expected.append((pair[0] + 0.3 * r * value, pair[1] + 0.3 * slope))
            kls.append(value)
    loss, slope, out = run(cases, config)
    assert loss == pytest.approx([v for v, _ in expected], rel=1e-9, abs=1e-12)
    assert slope == pytest.approx([s for _, s in expected], rel=1e-9, abs=1e-12)
    assert out.kl is not None
    assert out.kl.tolist() == pytest.approx(kls, abs=1e-12)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_with_the_ratio_the_expected_gradient_is_that_of_the_divergence(kind: str) -> None:
    """Over all tokens of a small vocabulary, drawn by another policy than the one that is trained."""
    generator = torch.Generator().manual_seed(1)
    logits, mu, ref = torch.randn(3, 6, generator=generator, dtype=torch.float64).log_softmax(-1)
    logits = logits.clone().requires_grad_()
    live = logits.log_softmax(-1)
    truth = (live.exp() * (live - ref)).sum()
    (expected,) = torch.autograd.grad(truth, logits, retain_graph=True)
    config = LossConfig(loss="ppo_clip", kl=kind, kl_weight=1.0)  # type: ignore[arg-type]
    zero = torch.zeros(6, dtype=torch.float64)
    out = token_loss(live, LossInputs(mu=mu, advantage=zero, ref=ref), config)
    (found,) = torch.autograd.grad((mu.exp() * out.loss).sum(), logits)
    assert torch.allclose(found, expected, atol=1e-12)
    assert expected.abs().max() > 0.05
    if kind != "k2":
        assert float((live.exp() * divergence(live, ref, kind)).sum().detach()) == pytest.approx(
            float(truth.detach())
        )


def test_before_the_first_update_the_trainers_ratio_is_one() -> None:
    """Nothing was recomputed yet, so the live log-probabilities are those from before the step."""
    cases = rollouts()
    for name in ("ppo_clip", "gspo", "decoupled"):
        config = LossConfig(loss=name, ratio="trainer")  # type: ignore[arg-type]
        logp, given = terms(cases, config)
        out = token_loss(logp, dataclasses.replace(given, prox=None, live_prox=None), config)
        w = (logp.detach() - given.mu).exp() if name == "decoupled" else torch.ones_like(given.mu)
        assert torch.allclose(out.loss, -given.advantage * w)
        assert not out.cut.any()
        (slope,) = torch.autograd.grad(out.loss.sum(), logp)
        assert torch.allclose(slope, -given.advantage * w)


def test_the_ratio_binds_when_old_is_not_new() -> None:
    """The classic bug compares the policy with itself: then nothing is ever cut."""
    new, old, one = torch.log(torch.tensor([0.6])), torch.log(torch.tensor([0.3])), torch.ones(1)
    for config in (LossConfig(), LossConfig(loss="ppo_clip")):
        assert token_loss(new, LossInputs(mu=old, advantage=one), config).cut.item()
        assert not token_loss(new, LossInputs(mu=new, advantage=one), config).cut.item()


@pytest.mark.parametrize(
    ("config", "lacking"),
    [
        (LossConfig(loss="gspo"), "sampler's"),
        (LossConfig(off_policy_mask=0.1), "sampler's"),
        (
            LossConfig(loss="ppo_clip", ratio="trainer", correction="tis", correction_level="rollout"),
            "trainer's own",
        ),
        (LossConfig(loss="ppo_clip", kl="k3"), "reference"),
    ],
)
def test_a_loss_that_lacks_log_probabilities_says_which(config: LossConfig, lacking: str) -> None:
    x = torch.zeros(1)
    with pytest.raises(TrainError, match=f"needs the {lacking} log-probabilities"):
        token_loss(x, LossInputs(mu=x, advantage=x), config)
    later = LossConfig(loss="gspo", ratio="trainer")
    with pytest.raises(TrainError, match="needs the trainer's own log-prob"):
        token_loss(x, LossInputs(mu=x, advantage=x, prox=x), later)


def test_choices_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="dual_clip"):
        LossConfig(dual_clip=0.5)
    for name, ratio in (("dppo", "trainer"), ("ppo_clip", "sampler"), ("gspo", "sampler")):
        with pytest.raises(
            ValueError, match=f"correction = 'tis' corrects ratio = 'trainer', which loss = '{name}' with"
        ):
            LossConfig(loss=name, ratio=ratio, correction="tis")  # type: ignore[arg-type]
    LossConfig(loss="decoupled", correction="tis")


def test_the_supervised_loss_looks_at_no_record() -> None:
    logp = torch.tensor([-0.5, -2.0], requires_grad=True)
    mu = torch.tensor([0.0, float("nan")])
    out = token_loss(logp, LossInputs(mu=mu, advantage=torch.ones(2)), LossConfig(loss="nll"))
    assert out.loss.tolist() == [0.5, 2.0]
    assert not out.cut.any()
    out.loss.sum().backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == [-1.0, -1.0]


def test_a_loss_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def reinforce(logp, inputs, config):\n    return -inputs.advantage * logp\n"
        "def mean(logp, inputs, config):\n    return -(inputs.advantage * logp).mean()\n"
        "def broken(logp, inputs, config):\n    raise ValueError('mine')\n"
        "def constant(logp, inputs, config):\n    return -logp.detach()\n"
        "import torch\n"
        "def large(logp, inputs, config):\n    raise torch.OutOfMemoryError('too large')\n"
    )
    logp = torch.tensor([-1.0, -2.0], requires_grad=True)
    inputs = LossInputs(mu=torch.tensor([-1.0, -2.0]), advantage=torch.tensor([1.0, -0.5]))
    found = token_loss(logp, inputs, LossConfig(loss=f"{tmp_path}/mine.py:reinforce"))
    assert found.loss.tolist() == [1.0, -1.0]
    assert not found.cut.any()
    with pytest.raises(TrainError, match=r"mine.py:mean did not return a tensor of shape \[2\]"):
        token_loss(logp, inputs, LossConfig(loss=f"{tmp_path}/mine.py:mean"))
    with pytest.raises(TrainError, match=r"mine.py:broken raised ValueError\('mine'\) \(mine.py line 6\)"):
        token_loss(logp, inputs, LossConfig(loss=f"{tmp_path}/mine.py:broken"))
    with pytest.raises(TrainError, match="mine.py:constant returned a tensor without a gradient"):
        token_loss(logp, inputs, LossConfig(loss=f"{tmp_path}/mine.py:constant"))
    with pytest.raises(torch.OutOfMemoryError):  # the trainer repeats the step with other memory options
        token_loss(logp, inputs, LossConfig(loss=f"{tmp_path}/mine.py:large"))
