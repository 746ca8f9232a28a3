"""How much goes wrong where text is encoded again, on a tokenizer of yours, without a network.

Run `python -m benchmarks.drift MODEL` (a folder with tokenizer.json, or that file; --json for one object on
the last line). Source code is cut, decoded and encoded in the ways in which gateways without token ids do it:

cuts       a text is cut at a random character and its halves are encoded apart: how often are the ids others?
splits     one token of a text is sampled as two that spell the same: how often does decoding and encoding
           again give the sampled ids? (Where it does not, training sees tokens that were never sampled.)
markers    text from outside holds a control marker: how often does the stock encoding make it a control
           token, how often does ours, and do both agree on text without markers?
"""

from __future__ import annotations

import json
import os
import random
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks._arguments import Arguments, count
from insitu.chat.codec import Codec
from insitu.errors import InsituError, RenderError

WINDOW = 2000
"""Characters of source text per trial."""
_PLACES = (
    "{}",
    "The file is called {}.py\n",
    '{{"output": "{}"}}',
    "def f():\n    return '{}'\n",
    "x\n{}\ny",
)
"""Where a marker stands in a text from outside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """How often something happened."""

    trials: int
    hits: int

    def reported(self) -> dict[str, float]:
        share = self.hits / self.trials if self.trials else 0.0
        return {"trials": self.trials, "hits": self.hits, "share": round(share, 5)}


def windows(seed: int) -> Iterator[str]:
    """Pieces of Python's own source files, the same for one seed and one Python."""
    rng = random.Random(seed)
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [p.read_text(encoding="utf-8", errors="replace") for p in paths if p.stat().st_size > 3 * WINDOW]
    while True:
        text = rng.choice(texts)
        start = rng.randrange(len(text) - WINDOW)
        yield text[start : start + WINDOW]


def cuts(codec: Codec, trials: int, seed: int) -> Found:
    """Texts whose halves, encoded apart, give other ids than the whole."""
    rng = random.Random(seed)
    hits = 0
    for _, text in zip(range(trials), windows(seed), strict=False):
        at = rng.randrange(1, len(text))
        apart = np.concatenate([codec.encode_content(text[:at]), codec.encode_content(text[at:])])
        hits += not np.array_equal(apart, codec.encode_content(text))
    return Found(trials=trials, hits=hits)


def splits(codec: Codec, trials: int, seed: int) -> Found:
    """Texts with one token said as two whose ids survive being decoded and encoded again."""
    rng = random.Random(seed)
    hits = done = 0
    for text in windows(seed + 1):
        if done == trials:
            break
        ids = codec.encode_content(text)
        sampled = _split_one(codec, ids, rng)
        if sampled is None:
            continue
        done += 1
        hits += np.array_equal(codec.encode_content(codec.decode(sampled)), sampled)
    return Found(trials=done, hits=hits)


def _split_one(codec: Codec, ids: np.ndarray, rng: random.Random) -> np.ndarray | None:
    """The ids with one token as two that spell the same text; None when few tokens can be split."""
    for _ in range(50):
        at = rng.randrange(len(ids))
        word = codec.decode(ids[at : at + 1])
        if len(word) < 2 or "\ufffd" in word:
            continue
        cut = rng.randrange(1, len(word))
        halves = [codec.encode_content(word[:cut]), codec.encode_content(word[cut:])]
        if all(len(half) == 1 for half in halves):
            return np.concatenate([ids[:at], *halves, ids[at + 1 :]])
    return None


def marked_texts(codec: Codec, seed: int) -> list[str]:
    """Source text with each marker in each place."""
    texts = windows(seed + 2)
    return [
        next(texts)[:200] + place.format(name) + next(texts)[:200]
        for name in codec.control
        for place in _PLACES
    ]


def injected(codec: Codec, texts: Sequence[str], *, stock: bool) -> Found:
    """Texts in which at least one id is a control token."""
    encode = codec.encode_stock if stock else codec.encode_content
    return Found(trials=len(texts), hits=sum(bool(codec.control_positions(encode(t))) for t in texts))


def agreement(codec: Codec, trials: int, seed: int) -> Found:
    """Texts without markers for which our encoder gives other ids than the stock one."""
    differ = 0
    for _, text in zip(range(trials), windows(seed + 3), strict=False):
        differ += not np.array_equal(codec.encode_stock(text), codec.encode_content(text))
    return Found(trials=trials, hits=differ)


def speed(codec: Codec, seed: int) -> dict[str, float]:
    """Megabytes of source text encoded per CPU second by both encoders."""
    texts = [text for _, text in zip(range(400), windows(seed + 4), strict=False)]
    size = sum(len(t.encode()) for t in texts) / 1e6
    reported = {}
    for name, encode in (("stock", codec.encode_stock), ("ours", codec.encode_content)):
        start = time.process_time()
        for text in texts:
            encode(text)
        reported[name] = round(size / (time.process_time() - start), 2)
    return reported


def measure(codec: Codec, trials: int, seed: int) -> dict[str, object]:
    texts = marked_texts(codec, seed)
    return {
        "vocabulary": codec.vocab_size,
        "control_tokens": len(codec.control),
        "cuts_differ": cuts(codec, trials, seed).reported(),
        "splits_survive": splits(codec, trials, seed).reported(),
        "markers_stock": injected(codec, texts, stock=True).reported(),
        "markers_ours": injected(codec, texts, stock=False).reported(),
        "plain_text_differs": agreement(codec, trials, seed).reported(),
        "mb_per_cpu_s": speed(codec, seed),
        "load_average": round(os.getloadavg()[0], 2),
    }


def load_codec(path: Path) -> Codec:
    """Raises RenderError when there is no usable tokenizer."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise RenderError(f"{path} is no tokenizer.json and no folder with one")
    return Codec(file.read_text(encoding="utf-8"))


def show(reported: dict[str, object]) -> None:
    table = Table("what", "trials", "hits", "share")
    for name, value in reported.items():
        if isinstance(value, dict) and "trials" in value:
            table.add_row(name, f"{value['trials']:,}", f"{value['hits']:,}", f"{value['share']:.2%}")
    Console().print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Arguments(prog="benchmarks drift", description=__doc__)
    parser.add_argument("model", type=Path, help="model folder or tokenizer.json")
    parser.add_argument("--trials", type=count, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    options = parser.parse_args(arguments)
    try:
        reported = measure(load_codec(options.model), options.trials, options.seed)
    except InsituError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    if not options.json:
        show(reported)
    print(json.dumps(reported))
    return 0


if __name__ == "__main__":
    sys.exit(main())
