"""TRL's side of `benchmarks grpo`: `python _peer_trl.py MODEL_FOLDER`, in TRL's own environment.

Same lines as `_grpo_insitu`: a job, then one step for each line. `GRPOTrainer` makes its usual step:
generation by transformers, rewards, loss and update, without gradient checkpointing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

JOB: dict[str, Any] = json.loads(sys.stdin.readline())
OUT = sys.stdout
COUNTED = {"sampled": 0}


def rewards(completion_ids: list[list[int]], **given: object) -> list[float]:
    """The same for all: alternating within a group, whose members follow each other."""
    COUNTED["sampled"] = sum(map(len, completion_ids))
    return [float(number % JOB["group_size"] % 2) for number in range(len(completion_ids))]


class Turns(TrainerCallback):  # type: ignore[misc]
    """Waits before a step for a line, and reports after it."""

    def __init__(self) -> None:
        self.began = (0.0, 0.0)

    def on_step_begin(self, *args: object, **given: object) -> None:
        if not sys.stdin.readline():
            raise SystemExit(0)
        self.began = (time.perf_counter(), time.process_time())

    def on_step_end(self, *args: object, **given: object) -> None:
        wall, cpu = time.perf_counter() - self.began[0], time.process_time() - self.began[1]
        print(json.dumps({"wall_s": wall, "cpu_s": cpu, **COUNTED}), file=OUT, flush=True)


def main(folder: str) -> None:
    torch.set_num_threads(JOB["threads"])
    logging.disable(logging.WARNING)
    config = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=JOB["group_size"],
        gradient_accumulation_steps=len(JOB["texts"]),
        num_generations=JOB["group_size"],
        max_completion_length=JOB["tokens"],
        generation_kwargs={"min_new_tokens": JOB["tokens"]},
        max_steps=1_000_000,
        learning_rate=JOB["lr"],
        lr_scheduler_type="constant",
        loss_type="dr_grpo",
        scale_rewards="none",
        beta=0.0,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        bf16=JOB["dtype"] == "bfloat16",
        gradient_checkpointing=False,
        use_cpu=True,
        shuffle_dataset=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1_000_000,
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )
    trainer = GRPOTrainer(
        model=sys.argv[1],
        reward_funcs=rewards,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": text} for text in JOB["texts"]]),
        callbacks=[Turns()],
    )
    for text, ids in zip(JOB["texts"], JOB["prompts"], strict=True):
        if trainer.processing_class(text, add_special_tokens=False)["input_ids"] != ids:
            raise SystemExit("TRL reads a prompt as other tokens")
    print("ready", file=OUT, flush=True)
    trainer.train()


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr), tempfile.TemporaryDirectory() as scratch:
        main(scratch)
