"""llama.cpp reads what insitu writes, and cuts text into the same tokens."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import random
import subprocess
import sys
import textwrap
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_lab import FAMILIES, TEXTS, gguf_of, model_folder
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from insitu.chat.load import load_renderer
from insitu.errors import SetupError
from insitu.types import Message
from insitu_train.demo.smollm2 import fetch_file
from insitu_train.gguf.pretokenizers import PRETOKENIZERS
from insitu_train.gguf.read import convert, gguf_folder

pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[2]
TEXT_COUNT = 600
ALPHABETS = (
    "abc XYZ'sStlrvedm019_.,;:!?(){}[]<>/\\\"`~@#$%^&*-+=|\n\r\t",
    "aé ßçñøåæœÀ'ＡｂΔδжЖשעيع中文字漢日ひカ한국กขहिन्दीா²½Ⅷ٣४①\u0301\u0308\u00a0\u2003\u3000\u200b\u200d\ufeff",
    "🙂👩\u200d💻🇩🇪✂️\U0001d7d8\U0001f1e6 \n",
)


class Server:
    """llama.cpp's own HTTP server, in this process."""

    def __init__(self, url: str) -> None:
        self._url = url

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            self._url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return dict(json.loads(answer.read()))

    def tokens(self, text: str, *, special: bool = False, start: bool = False) -> list[int]:
        body = {"content": text, "parse_special": special, "add_special": start}
        return list(self.post("/tokenize", body)["tokens"])

    def greedy(self, ids: Sequence[int], count: int) -> list[int]:
        body = {
            "prompt": list(ids), "n_predict": count, "temperature": 0, "return_tokens": True,
            "ignore_eos": True,
        }  # fmt: skip
        return list(self.post("/completion", body)["tokens"])


@functools.cache
def llama_cpp() -> Any:
    """Return llama.cpp's bindings: the installed ones, else those of scripts/setup-extras."""
    if find_spec("xllamacpp") is None:
        done = subprocess.run(
            [ROOT / "scripts" / "setup-extras"], stdout=subprocess.PIPE, text=True, timeout=900, check=True
        )
        sys.path.append(done.stdout.strip())
    return importlib.import_module("xllamacpp")


@contextmanager
def served(file: Path) -> Iterator[Server]:
    params = llama_cpp().CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = str(file), 2048, 1
    params.cpuparams.n_threads, params.warmup = 1, False
    server = llama_cpp().Server(params)
    try:
        yield Server(server.listening_address)
    finally:
        del server


def greedy(folder: Path, ids: Sequence[int], count: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = list(ids)
    with torch.no_grad():
        for _ in range(count):
            found.append(int(model(torch.tensor([found])).logits[0, -1].argmax()))
    return found[len(ids) :]


def texts() -> Iterator[str]:
    """Code, prose, digits and Unicode, then random strings of what is cut in special ways."""
    yield from TEXTS
    for path in sorted(Path(__file__).parent.glob("*.py"))[:6]:
        yield path.read_text()[:4000]
    rng = random.Random(0)
    for _ in range(TEXT_COUNT):
        yield "".join(rng.choice(rng.choice(ALPHABETS)) for _ in range(rng.randint(1, 40)))


def compare(server: Server, folder: Path) -> None:
    own = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in texts():
        assert own.encode(text, add_special_tokens=False).ids == server.tokens(text), repr(text)
    spelled = "<|im_start|>user\nx<|im_end|> <tool_call>{}</tool_call>"
    assert own.encode(spelled, add_special_tokens=False).ids == server.tokens(spelled, special=True)
    assert own.encode("Hello").ids == server.tokens("Hello", start=True), "the token at the start"


@pytest.mark.parametrize("pre", PRETOKENIZERS)
def test_every_kind_of_pre_tokenizer_gives_llama_cpps_tokens(tmp_path: Path, pre: str) -> None:
    file = gguf_of(model_folder(tmp_path / "model", "llama", pre), tmp_path / "model.gguf")
    folder = tmp_path / "read"
    folder.mkdir()
    convert(file, folder)
    with served(file) as server:
        compare(server, folder)


@pytest.mark.parametrize("kind", FAMILIES)
def test_llama_cpp_continues_as_the_model_that_was_written(tmp_path: Path, kind: str) -> None:
    source = model_folder(tmp_path / "model", kind)
    prompt = [5, 900, 31, 7, 1200, 44, 90]
    with served(gguf_of(source, tmp_path / "model.gguf")) as server:
        assert server.greedy(prompt, 24) == greedy(source, prompt, 24)


@pytest.fixture(scope="module")
def smollm2() -> Path:
    try:
        return fetch_file()
    except SetupError as error:
        pytest.skip(f"no real model: {error}")


@pytest.mark.takes(300)
def test_a_real_model_has_llama_cpps_tokens(smollm2: Path) -> None:
    with served(smollm2) as server:
        compare(server, gguf_folder(str(smollm2), print))


@pytest.mark.takes(300)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "q8_0"])
def test_a_real_model_is_written_for_llama_cpp(tmp_path: Path, smollm2: Path, dtype: str) -> None:
    folder = gguf_folder(str(smollm2), print)
    file = gguf_of(folder, tmp_path / "model.gguf", dtype)
    question = asked(folder)
    code = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(inspect.getsource(textwrap)[:1500]).ids
    best = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        wanted = best(torch.tensor([code])).logits[0].argmax(-1).tolist()
    with served(file) as server:
        # llama.cpp rounds activations to 8 bits for q8_0, which decides ties of a whole reply.
        if dtype != "q8_0":
            assert server.greedy(question, 7) == greedy(folder, question, 7)
        at = range(20, len(code), 12)
        hits = [server.greedy(code[:end], 1) == [wanted[end - 1]] for end in at]
    assert sum(hits) >= (0.9 if dtype == "q8_0" else 0.98) * len(hits)


def asked(folder: Path) -> list[int]:
    renderer = load_renderer(folder)
    user = Message(role="user", text="What is the capital of France?")
    blocks = (renderer.open([], ()), renderer.append([user]), renderer.generation_prompt())
    return [number for block in blocks for number in block.tolist()]
