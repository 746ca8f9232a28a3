"""Cards of an exported data set and of a checkpoint, as the Hub reads them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from insitu.config import Config
from insitu.storage.run_dir import read_config, read_store, read_summary
from insitu.storage.store import StepRecord, Store

_CARD = """---
pretty_name: {name}
tags: [insitu, reinforcement-learning, agents, rollouts]
configs:
- config_name: rows
  default: true
  data_files: data/rows.parquet
- config_name: rollouts
  data_files: data/rollouts.parquet
---

# {name}

{rollouts:,} rollouts of the agent `{agent}` with the model `{model}`, exported by insitu: {rows:,} training
rows, {tokens:,} tokens. Ids and log-probabilities are those of the sampler; nothing was encoded again.

```python
from datasets import load_dataset

rows = load_dataset("PATH_OR_NAME", "rows", split="train").with_format("numpy")
rollouts = load_dataset("PATH_OR_NAME", "rollouts", split="train")
```

`insitu import FOLDER` makes a run directory of a download, for `insitu view` and `sft`.

- `rows`: one training row each. `mask` = sampled tokens that may be trained, `logprobs` and `versions` of
  these, `advantage` (null = not scored), `weight` (factor of the sum of the row's token losses), `used`
  (empty = trained; else why not), `prompt_len`, `experts` (base64 .npy, or null).
- `rollouts`: reward (null = not graded), verdict, messages of the main line, diff, changed files, timings.

| tokens | |
|---|---|
| sampled | {captured:,} |
| trained | {trained:,} |
{excluded}
{left_out}"""


def dataset_card(config: Config, manifest: Mapping[str, Any]) -> str:
    """Return the README of the data set with its account of tokens."""
    account = manifest["account"]
    excluded = "\n".join(f"| not trained: {why} | {n:,} |" for why, n in account["excluded"].items())
    n = len(manifest["left_out"])
    return _CARD.format(
        name=f"insitu rollouts {manifest['run']}",
        agent=config.agent_names,
        model=Path(config.model.path).name or "demo model",
        rollouts=manifest["rollouts"],
        rows=manifest["rows"],
        tokens=manifest["tokens"],
        captured=account["captured"],
        trained=account["trained"],
        excluded=excluded,
        left_out=f"\n{n} rollouts are left out: they hold what looks like a secret.\n" if n else "",
    )


_HEAD = """---
tags: [insitu, reinforcement-learning, agents]
library_name: {library}
---

# {name}
"""


def model_card(checkpoint: Path, adapters_of: str = "") -> str:
    """Return the README of a checkpoint, with the facts of the run whose directory it is in.

    adapters_of: name of the model below, where it holds adapters.
    """
    run = next((folder for folder in checkpoint.parents[:2] if (folder / "config.toml").is_file()), None)
    name = f"{run.name} {checkpoint.name}" if run is not None else checkpoint.name
    library = "peft" if adapters_of else "transformers"
    lines = [_HEAD.format(name=name, library=library)]
    if adapters_of:
        lines.append(f"Adapters of `{adapters_of}`.\n")
    if run is None:
        return "\n".join([*lines, "Trained with insitu; the run is not known.\n"])
    config = read_config(run)
    with read_store(run) as store:
        facts = list(_facts(config, store, checkpoint.name, read_summary(run) or {}))
    lines.append(
        f"Trained with insitu inside the coding agent `{config.agent_names}`, on the tokens that it sampled"
        " in sandboxes.\n"
    )
    return "\n".join([*lines, "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts), ""])


def _facts(config: Config, store: Store, name: str, summary: Any) -> Iterator[tuple[str, Any]]:
    step = _step_of(store, name)
    yield "start model", f"`{Path(config.model.path).name or 'demo model'}`"
    yield "tasks", f"{', '.join(f'`{table.source}`' for table in config.tasks)}"
    yield "agent", f"`{config.agent_names}` {summary.get('agent_version', '')}".strip()
    if step is not None:
        yield "optimizer steps", f"{step.step} of {config.run.steps}"
        yield "mean reward of its step", step.metrics.get("reward_mean")
        for score in (store.scores(phase, step.step)[""] for phase in ("eval_during", "eval_after")):
            if score.total:
                counts = f"{score.solved} of {score.total} rollouts"
                yield "held-out solve rate after it", f"{score.rate:.3f}, {counts}"
    before, after = summary.get("heldout_before"), summary.get("heldout_after")
    yield "held-out solve rate before and after the run", f"{before}, {after}"
    yield "loss, advantage", f"`{config.train.loss}`, `{config.train.advantage}`"
    yield "learning rate, seed", f"{config.train.lr:g}, {config.run.seed}"
    ledger = store.ledger()
    yield "tokens sampled and trained in the run", f"{ledger.captured:,}, {ledger.trained:,}"
    for reason, tokens in sorted(ledger.excluded.items()):
        yield f"not trained: {reason}", f"{tokens:,}"


def _step_of(store: Store, name: str) -> StepRecord | None:
    found = re.fullmatch(r"step-(\d+)", name)
    steps = {record.step: record for record in store.steps()}
    return steps.get(int(found[1])) if found else None
