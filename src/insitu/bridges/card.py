"""Card of an exported data set, as the Hub and `datasets.load_dataset` read it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from insitu.config import Config

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
