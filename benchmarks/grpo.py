"""What does a whole GRPO step of a real model cost on a CPU, beside TRL's GRPOTrainer?

Run `python -m benchmarks grpo --model FOLDER` (or a GGUF file; --json: one object on the last line). Both
sides have the same weights, prompts, rewards, group size, type and number of sampled tokens, no reference
policy and no gradient checkpointing; each is a process of its own, whose threads sleep while they wait, and
they take turns. A step is everything from the prompts to the updated weights, which insitu also copies into
its sampler. The first step of each is not counted; medians over the repeats. CPU seconds are beside wall time
because they hardly depend on other programs. A step of insitu also compares each sampled log-probability with
the trainer's, within 1e-4 in float32, and ends the benchmark where they differ.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks._arguments import Arguments, amount, count
from benchmarks._peers import Peer, installed
from benchmarks._process import ROOT, Process
from insitu.errors import ConfigError, SetupError
from insitu_train.demo.functions import TRAINED
from insitu_train.gguf.read import gguf_folder
from insitu_train.learner.process import computing

TRL = Peer(name="trl", requirement="trl==1.16.0", driver="_peer_trl.py", over=True)
HERE = Path(__file__).parent


def prompts(folder: Path, groups: int) -> tuple[list[str], list[list[int]]]:
    """Return the first tasks of the demo as the model's template writes them, and their tokens."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tasks = TRAINED[:: len(TRAINED) // groups][:groups]
    talks = [[{"role": "user", "content": task["prompt"]}] for task in tasks]
    texts = [
        tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True) for talk in talks
    ]
    return texts, [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def side(name: str, folder: Path) -> Process:
    """Start a side. Raises SetupError when TRL cannot be installed."""
    if name == "insitu":
        command = [sys.executable, "-m", "benchmarks._grpo_insitu", str(folder)]
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    else:
        command, paths = [str(installed(TRL)), str(HERE / TRL.driver), str(folder)], []
    offline = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths)}
    errors = None if name == "insitu" else subprocess.DEVNULL
    return Process.of(command, env=computing(os.environ) | offline, stderr=errors)


def measure(
    folder: Path, job: Mapping[str, Any], names: Sequence[str], repeats: int
) -> dict[str, dict[str, float]]:
    """Return the medians of each side. Raises RuntimeError when one samples another number of tokens."""
    wanted = len(job["prompts"]) * job["group_size"] * job["tokens"]
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with ExitStack() as stack:
        sides = {name: side(name, folder) for name in names}
        for one in sides.values():
            stack.callback(one.end)
            one.say(job)
        for one in sides.values():
            one.receive()
        for turn in range(repeats + 1):
            for name, one in sides.items():
                found = one.ask("step")
                if found["sampled"] != wanted:
                    raise RuntimeError(f"{name} sampled {found['sampled']} tokens instead of {wanted}")
                kind = "" if turn else ", to warm up"
                _say(f"{name}: {found['cpu_s']:.1f} CPU s, {found['wall_s']:.1f} s{kind}")
                if turn:
                    taken[name].append(found)
    return {name: _medians(found) for name, found in taken.items()}


def _medians(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return medians; of the gap the largest."""
    medians = {name: round(statistics.median(one[name] for one in found), 2) for name in found[0]}
    return medians | ({"gap": max(one["gap"] for one in found)} if "gap" in found[0] else {})


def main(argv: list[str]) -> int:
    parser = Arguments(prog="benchmarks grpo", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a model folder or a GGUF file")
    parser.add_argument("--groups", type=count, default=2)
    parser.add_argument("--group-size", type=count, default=8)
    parser.add_argument("--tokens", type=count, default=32, help="sampled for each row, no more and no less")
    parser.add_argument("--token-budget", type=count, default=1024, help="of one pass of insitu")
    parser.add_argument("--lr", type=amount, default=1e-6)
    parser.add_argument("--repeats", type=count, default=5)
    parser.add_argument("--threads", type=count, default=2)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--alone", action="store_true", help="without TRL")
    parser.add_argument("--json", action="store_true")
    args: argparse.Namespace = parser.parse_args(argv)
    try:
        folder = args.model if args.model.is_dir() else gguf_folder(str(args.model), _say)
    except ConfigError as error:
        parser.error(str(error))
    texts, ids = prompts(folder, args.groups)
    shape = ("group_size", "tokens", "token_budget", "lr", "threads", "dtype")
    job = {name: getattr(args, name) for name in shape} | {"texts": texts, "prompts": ids}
    names = ["insitu"] if args.alone else ["insitu", "trl"]
    try:
        found = measure(folder, job, names, args.repeats)
    except SetupError as error:
        parser.error(str(error))
    result: dict[str, Any] = {
        **found,
        "settings": {name: job[name] for name in shape} | {"groups": args.groups, "repeats": args.repeats},
        "prompt_tokens": [len(one) for one in ids],
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "load_average": round(os.getloadavg()[0], 1),
    }
    if "trl" in found:
        result["ratio_cpu"] = round(found["trl"]["cpu_s"] / found["insitu"]["cpu_s"], 2)
        result["ratio_wall"] = round(found["trl"]["wall_s"] / found["insitu"]["wall_s"], 2)
        _say(f"TRL takes {result['ratio_cpu']} x insitu's CPU seconds, {result['ratio_wall']} x its time")
    for name, one in found.items():
        _say(f"{name}, medians: {one['cpu_s']} CPU s, {one['wall_s']} s")
    if args.json:
        print(json.dumps(result))
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
