"""The model written by hand says what its table says, wherever its words stand in a long context."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from written_model import Reply, Table, table_of, written

from insitu_train.embedded.model import Qwen3

pytestmark = pytest.mark.full

WORDS = {f" w{n}": n for n in range(64)}
"""Text -> id; texts are words with a space before each."""
STOP, VOCABULARY, POSITIONS = 99, 4096, 16_384
PROMPT = (STOP, 98, 97, 96, 98)
MARKERS = (" w1", " w2", " w3")
REPLIES = (
    Reply(after=[" w1"], text=" w2 w7 w8 w9 w7 w8 w10"),
    Reply(after=[" w1"], text=" w2 w7 w8 w9 w7 w8 w11"),
    Reply(after=[" w2"], text=" w3 w7 w8 w12", not_behind=" w5"),
    Reply(after=[" w2"], text=" w20 w21", behind=" w5"),
    Reply(after=[" w2"], text=" w30 w31", behind=" w6", urgent=True),
)


def encode(text: str) -> list[int]:
    return [WORDS[f" {word}"] for word in text.split()]


@pytest.fixture(scope="module")
def table() -> Table:
    return table_of(encode, PROMPT, STOP, REPLIES, MARKERS)


@pytest.fixture(scope="module")
def model(table: Table) -> Qwen3:
    return written(table, VOCABULARY, POSITIONS)


def probabilities(model: Qwen3, ids: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        hidden = model.hidden(torch.tensor(ids[:-1]), torch.tensor([ids[-1:]]))
        return model.logits(hidden)[0, -1].softmax(-1)


@pytest.mark.parametrize("distance", [0, 300, 9000])
@pytest.mark.parametrize(
    ("marker", "behind", "said"),
    [
        (" w1", "", {" w2 w7 w8 w9 w7 w8 w10", " w2 w7 w8 w9 w7 w8 w11"}),
        (" w2", "", {" w3 w7 w8 w12"}),
        (" w2", " w5", {" w20 w21"}),
        (" w2", " w6", {" w30 w31"}),
    ],
)
def test_it_says_the_reply_of_the_latest_marker(
    table: Table, model: Qwen3, distance: int, marker: str, behind: str, said: set[str]
) -> None:
    noise = np.random.default_rng(distance).integers(200, VOCABULARY, 4000 + distance).tolist()
    other = [*encode(" w3"), *noise[:4000], *encode(marker), *noise[4000:]]
    context = [*other, *encode(behind), *PROMPT]
    found: list[int] = []
    while not found or found[-1] != STOP:
        chances = probabilities(model, [*context, *found])
        expected = table.next(np.array([*context, *found]))
        assert sum(float(chances[token]) for token in expected) > 0.99
        assert all(float(chances[token]) > 0.2 for token in expected)
        found.append(expected[-1])
    assert found[:-1] in [encode(text) for text in said]


def test_it_says_something_uncertain_where_no_row_fits(model: Qwen3) -> None:
    """The start-up probe of an engine needs it."""
    chances = probabilities(model, [200, 300, 400])
    assert 0.2 < float(chances.max()) < 0.98
