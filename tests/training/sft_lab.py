"""Run directories whose rollouts can be imitated: the warm start's tokens, a model of few weights."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
from train_lab import rollout, segment

from insitu.chat.load import load_renderer
from insitu.config import WARM_START, Config, load_config
from insitu.storage.run_dir import RunDir
from insitu.types import Message, Rollout, Status
from insitu_train.embedded.architecture import ModelConfig
from insitu_train.embedded.model import initialise, save_model

FAMILY = load_renderer(WARM_START)


def student(folder: Path, seed: int = 0) -> Path:
    """A small model with the warm start's tokenizer."""
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(WARM_START / name, folder)
    config = ModelConfig(
        vocab_size=FAMILY.vocab_size, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, intermediate_size=48, max_position_embeddings=2048,
    )  # fmt: skip
    save_model(initialise(config, seed), folder)
    return folder


def said(name: str, task: str, text: str, reward: float | None = 1.0, status: Status = Status.OK) -> Rollout:
    """One call: the task's prompt, and `text` as the model's reply."""
    prompt = np.concatenate(
        [FAMILY.open((), ()), FAMILY.append([Message(role="user", text=task)]), FAMILY.generation_prompt()]
    )
    reply = FAMILY.render_reply(Message(role="assistant", text=text))
    ids = np.concatenate([prompt, reply])
    mask = [False] * len(prompt) + [True] * len(reply)
    made = rollout(name, reward, [segment(name, 0, list(ids), mask, [-1.0] * len(ids))], status=status)
    return replace(made, task_id=task)


def stored_run(folder: Path, rollouts: list[Rollout], **overrides: str) -> Path:
    """A run directory that holds them; phase, step, group and slot are in the ids."""
    texts = [f"run.dir={folder}", f"model.path={student(folder.parent / 'student')}"]
    texts += [f"{name.replace('__', '.')}={value}" for name, value in overrides.items()]
    with RunDir.create(load_config(None, texts)) as run, run.store() as store:
        for made in rollouts:
            phase, step, group, slot = made.id.split("/")
            store.put_rollout(phase, int(step), int(group), int(slot), made)
    return folder


def sft_config(source: Path, target: Path, *overrides: str) -> Config:
    texts = [f"run.dir={target}", f"sft.run={source}", f"model.path={source.parent / 'student'}"]
    texts += [
        "train.warmup_steps=0",
        "train.threads=1",
        "train.lr=0.01",
        "train.decay=linear",
        "train.epochs=2",
        "model.max_context_tokens=512",
    ]
    return load_config(None, [*texts, *overrides])
