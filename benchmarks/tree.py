"""`python -m benchmarks tree`: a training pass over a prefix tree against the same rows one after another.

Both sides run the same model, kernels and head; the linear one is a flat list of rows, each causal on its
own, without padding. Equal gradients first, in float32: `max_rel_grad_diff` is the largest difference in a
parameter's gradient as a share of its largest number. A GPU is timed in bfloat16, through other kernels:
there each way to attend is also held against float32 beforehand, each row on its own. `work_ratio` is exact:
operations of matrices, of attention pairs and of the head, of the linear side over the tree's. A CPU gets a
small model and short rollouts (in seconds of CPU time); a GPU Qwen3-0.6B's shape, a million tokens and both
ways to attend.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks._arguments import Arguments, amount, chosen_device, count, either_share
from benchmarks._tree_rows import Work, rows_of, tree_work
from insitu.config.training import LossConfig
from insitu_train.attention.tree import Piece, TreeAttend
from insitu_train.embedded.architecture import ModelConfig
from insitu_train.embedded.model import initialise
from insitu_train.loss.fused_head import objective
from insitu_train.loss.losses import LossInputs, token_loss
from insitu_train.model.base import Attend
from insitu_train.plan.prefix_tree import Tree, build_tree
from insitu_train.plan.step import PlanRow

SMALL = ModelConfig(
    vocab_size=1024, hidden_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=64, intermediate_size=768,
)  # fmt: skip
LARGE = ModelConfig(
    vocab_size=151_936, hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
    head_dim=128, intermediate_size=3072, rope_theta=1e6, max_position_embeddings=131_072,
)  # fmt: skip
LIMIT = 1e-5
ROUNDED_LIMIT = 0.05
"""Of bfloat16: the norm of a gradient's difference from float32, as a share of the gradient's own. Rounding
alone gives about a hundredth; a wrong merge or a wrong pair a tenth and more."""
PRINTED = ("speedup", "work_ratio", "max_rel_grad_diff")
"""What the JSON has; the rest is said on stderr."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward and backward pass over a flat list of tokens."""

    ids: Tensor
    positions: Tensor
    attend: Attend
    at: Tensor
    """[N] indices of the tokens that predict."""
    targets: Tensor
    mu: Tensor
    advantage: Tensor


def _tensor(array: Any, device: torch.device) -> Tensor:
    kept = np.asarray(array)
    return torch.from_numpy(kept.astype(np.int64 if kept.dtype.kind == "i" else np.float32)).to(device)


def tree_pass(tree: Tree, attend: Attend, device: torch.device) -> Pass:
    fields = (tree.at, tree.target, tree.mu, tree.advantage)
    at, targets, mu, advantage = (_tensor(f, device) for f in fields)
    return Pass(
        _tensor(tree.ids, device), _tensor(tree.positions, device), attend, at, targets, mu, advantage
    )


def linear_passes(rows: Sequence[PlanRow], most: int, device: torch.device) -> list[Pass]:
    """Rows one after another, cut into passes of about `most` tokens at most."""
    bundles: list[list[PlanRow]] = [[]]
    for row in rows:
        if bundles[-1] and sum(len(r.ids) for r in bundles[-1]) + len(row.ids) > most:
            bundles.append([])
        bundles[-1].append(row)
    return [_linear(bundle, device) for bundle in bundles]


def _linear(rows: Sequence[PlanRow], device: torch.device) -> Pass:
    start = np.concatenate([[0], np.cumsum([len(r.ids) for r in rows])])
    pieces = tuple(
        Piece(a, b, a, b, True) for a, b in zip(start[:-1].tolist(), start[1:].tolist(), strict=True)
    )
    trained = [np.flatnonzero(r.mask) for r in rows]
    return Pass(
        _tensor(np.concatenate([r.ids for r in rows]), device),
        _tensor(np.concatenate([np.arange(len(r.ids)) for r in rows]), device),
        TreeAttend(pieces),
        _tensor(np.concatenate([t - 1 + s for t, s in zip(trained, start[:-1], strict=True)]), device),
        _tensor(np.concatenate([r.ids[t] for r, t in zip(rows, trained, strict=True)]), device),
        _tensor(np.concatenate([r.logprobs[t] for r, t in zip(rows, trained, strict=True)]), device),
        _tensor(
            np.concatenate([np.full(len(t), r.advantage) for r, t in zip(rows, trained, strict=True)]), device
        ),
    )


def train(policy: Any, passes: Sequence[Pass]) -> None:
    """Leave the gradients of one step in `.grad`."""
    for _, p in policy.named_parameters():
        p.grad = None
    count = sum(len(p.at) for p in passes)
    config = LossConfig(loss="ppo_clip")
    for p in passes:
        hidden = policy.flat(p.ids, p.positions, p.attend)[p.at]

        def loss(logp: Tensor, part: slice, p: Pass = p) -> Tensor:
            return token_loss(logp, LossInputs(p.mu[part], p.advantage[part]), config).loss / count

        objective(hidden, policy.head_weight, p.targets, 1.0, loss).total.backward()  # type: ignore[no-untyped-call]


def gradients(policy: Any, passes: Sequence[Pass]) -> dict[str, Tensor]:
    train(policy, passes)
    return {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}


def difference(policy: Any, tree: Sequence[Pass], linear: Sequence[Pass]) -> float:
    ours, theirs = gradients(policy, tree), gradients(policy, linear)
    if ours.keys() != theirs.keys():
        raise RuntimeError("the sides trained different parameters")
    return max(float((ours[n] - g).abs().max() / g.abs().max()) for n, g in theirs.items())


def rounding(found: dict[str, Tensor], true: dict[str, Tensor]) -> float:
    """Largest difference of a parameter's gradient, as a share of it, both as norms."""
    if found.keys() != true.keys():
        raise RuntimeError("the sides trained different parameters")
    return max(float((found[n].double() - g.double()).norm() / g.double().norm()) for n, g in true.items())


def operations(c: ModelConfig, tokens: int, pairs: int, trained: int) -> float:
    """Of a forward and backward pass: matrices x 3, attention x 3.5 (the backward multiplies five times
    where the forward does twice), head x 3."""
    wide = c.num_attention_heads * c.head_dim
    narrow = c.num_key_value_heads * c.head_dim
    layer = c.hidden_size * (2 * wide + 2 * narrow + 3 * c.intermediate_size)
    dense = 3.0 * 2 * tokens * layer * c.num_hidden_layers
    return dense + 3.5 * 4 * pairs * wide * c.num_hidden_layers + 6.0 * trained * c.vocab_size * c.hidden_size


def clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def seconds(runs: dict[str, Callable[[], None]], repeats: int, device: torch.device) -> dict[str, float]:
    """Median of each, taking turns, after a warm-up."""
    seen: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            begin = clock(device)
            run()
            if turn:
                seen[name].append(clock(device) - begin)
    return {name: float(np.median(values)) for name, values in seen.items()}


def ways(tree: Tree, device: torch.device) -> dict[str, Attend]:
    """How a tree can be attended to on this device."""
    found: dict[str, Attend] = {"pieces": TreeAttend.of(tree)}
    if device.type == "cuda":
        from insitu_train.attention.flex import FlexAttend

        found["flex"] = FlexAttend.of(tree, device)
    return found


def make_policy(config: ModelConfig, dtype: torch.dtype, device: torch.device, *, hf: bool = False) -> Any:
    """Random weights; on a GPU a model of transformers with checkpointed layers, as the trainer runs one."""
    if device.type == "cpu" and not hf:
        return initialise(config, 0)
    from transformers import AttentionInterface, AutoModelForCausalLM, Qwen3Config

    from insitu_train.model.base import MemoryOptions
    from insitu_train.model.hf import NAME, HfPolicy, attention_function

    AttentionInterface.register(NAME, attention_function)
    shape: dict[str, Any] = {k: v for k, v in asdict(config).items() if k != "rope_theta"}
    theta = {"rope_type": "default", "rope_theta": config.rope_theta}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        Qwen3Config(**shape, rope_parameters=theta), dtype=torch.float32, attn_implementation=NAME
    )
    policy = HfPolicy(model.to(device).train(), dtype=dtype)
    policy.techniques = MemoryOptions(checkpoint=True)
    return policy


def measure(work: Work, config: ModelConfig, device: torch.device, repeats: int) -> dict[str, Any]:
    """One workload: equal gradients in float32, then times."""
    gpu = device.type == "cuda"
    # In float32 attention runs through flex on a GPU: flash kernels know only 16 bits.
    few = rows_of(replace(work, tokens=40_000, vocab=SMALL.vocab_size).scaled(1 / 16) if gpu else work)
    exact = make_policy(SMALL if gpu else config, torch.float32, device)
    small = build_tree(few)
    attend = ways(small, device)
    linear = _linear_side(few, small.tokens, device)
    worst = difference(exact, [tree_pass(small, attend["flex" if gpu else "pieces"], device)], linear)
    rounded = rounded_ways(SMALL, gradients(exact, linear), small, attend, device) if gpu else {}
    policy = make_policy(config, torch.bfloat16, device) if gpu else exact
    rows = rows_of(work)
    tree = build_tree(rows)
    linear = linear_passes(rows, tree.tokens, device)
    passes = {name: [tree_pass(tree, way, device)] for name, way in ways(tree, device).items()}
    runs: dict[str, Callable[[], None]] = {"linear": lambda: train(policy, linear)}
    runs |= {name: (lambda p=p: train(policy, p)) for name, p in passes.items()}  # type: ignore[misc]
    times = seconds(runs, repeats, device)
    best = min(passes, key=lambda name: times[name])
    raw = sum(len(r.ids) for r in rows)
    fewer = tree_work(tree, [len(r.ids) for r in rows])
    return {
        "speedup": round(times["linear"] / times[best], 3),
        "work_ratio": round(_ratio(tree, rows, config), 3),
        "max_rel_grad_diff": float(f"{worst:.3g}"),
        "rounded": {name: float(f"{share:.3g}") for name, share in rounded.items()},
        "attention": best,
        "ratios": {"tokens": round(fewer[0], 3), "pairs": round(fewer[1], 3)},
        "rows": len(rows),
        "tokens": {"linear": raw, "tree": tree.tokens, "trained": len(tree.at)},
        "seconds": {name: round(s, 4) for name, s in times.items()},
        "tokens_per_s": round(raw / times[best], 1),
    }


def rounded_ways(
    config: ModelConfig, true: dict[str, Tensor], tree: Tree, attend: dict[str, Attend], device: torch.device
) -> dict[str, float]:
    """How far each way to attend, as it is timed, is from the float32 gradients of the same weights."""
    policy = make_policy(config, torch.bfloat16, device, hf=True)
    return {
        name: rounding(gradients(policy, [tree_pass(tree, way, device)]), true)
        for name, way in attend.items()
    }


def _linear_side(rows: Sequence[PlanRow], most: int, device: torch.device) -> list[Pass]:
    """The rows one after another, in float32."""
    if device.type != "cuda":
        return linear_passes(rows, most, device)
    from insitu_train.attention.rows import Causal

    # one row at a time: the flash kernel of the timed side does not take float32
    return [_with(p, Causal()) for row in rows for p in linear_passes([row], 1, device)]


def _with(p: Pass, attend: Attend) -> Pass:
    return Pass(p.ids, p.positions, attend, p.at, p.targets, p.mu, p.advantage)


def _ratio(tree: Tree, rows: Sequence[PlanRow], config: ModelConfig) -> float:
    lengths = [len(r.ids) for r in rows]
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    own = int(tree.positions.sum(dtype=np.int64)) + tree.tokens
    return operations(config, sum(lengths), pairs, len(tree.at)) / operations(
        config, tree.tokens, own, len(tree.at)
    )


def main(argv: list[str] | None = None) -> int:
    """Measure and print; JSON on stdout. Status 1 when the gradients differ."""
    parser = Arguments(prog="benchmarks tree", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--tokens", type=count, help="of all rows; 1000000 on a GPU, 40000 on a CPU")
    parser.add_argument("--scale", type=amount, help="of all lengths; 1 on a GPU, 1/16 on a CPU")
    forks = "share of turns that fork; -0.25: of rollouts, once"
    parser.add_argument("--forks", type=either_share, default=0.25, help=forks)
    parser.add_argument("--repeats", type=count, default=3)
    parser.add_argument("--threads", type=count, default=1, help="on a CPU")
    parser.add_argument("--json", action="store_true", help="print only the JSON")
    args = parser.parse_args(argv)
    kind = chosen_device(parser, args.device)
    gpu = kind == "cuda"
    torch.set_num_threads(args.threads)
    config = LARGE if gpu else SMALL
    tokens = args.tokens or (1_000_000 if gpu else 40_000)
    work = Work(tokens=tokens, forks=args.forks, vocab=config.vocab_size)
    work = work.scaled(args.scale or (1.0 if gpu else 1 / 16))
    result = measure(work, config, torch.device(kind), args.repeats)
    if not args.json:
        described = {
            "device": torch.cuda.get_device_name() if gpu else platform.machine(),
            "torch": torch.__version__,
            "forks": args.forks,
        }
        for name, value in {**described, **result}.items():
            print(f"{name:18} {value}", file=sys.stderr)
        part = result["speedup"] / result["work_ratio"]
        print(f"{result['speedup']} x faster, {part:.0%} of the work saved", file=sys.stderr)
    print(json.dumps({name: result[name] for name in PRINTED}))
    equal = result["max_rel_grad_diff"] <= LIMIT and all(
        share <= ROUNDED_LIMIT for share in result["rounded"].values()
    )
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
