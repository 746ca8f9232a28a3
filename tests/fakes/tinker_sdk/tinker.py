"""A stand-in for the Tinker SDK 0.9 and its service, over the package's Qwen3 in this process.

It offers the calls that insitu makes, with the SDK's names and shapes. All weights are trained instead of
adapters. `rule` is how the service sums losses: "sum", "skyrl" (each row by its length, a step by its number
of rows) or "root" (by the root of the length, which no service does). The folder FAKE_TINKER holds saved
states, the file `rule`, a file per call that fails once (`fail-optim_step`), and `load-first` where a load
must be the first request for its adapters.
"""

from __future__ import annotations

import copy
import os
import threading
import uuid
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from insitu.errors import EngineError
from insitu.types import Generation, RequestKey, SamplingParams
from insitu_train.embedded.core import EmbeddedCore, EngineOptions
from insitu_train.embedded.model import Qwen3, load_model

__version__ = "0.9.0-fake"
_models: dict[str, Qwen3] = {}
"""Sampler weights by path."""


@dataclass
class ModelInput:
    ids: list[int]

    @classmethod
    def from_ints(cls, ids: list[int]) -> ModelInput:
        return cls(ids)


@dataclass
class TensorData:
    data: list[Any]
    dtype: str
    shape: list[int]


@dataclass
class Datum:
    model_input: ModelInput
    loss_fn_inputs: dict[str, TensorData]


types = SimpleNamespace(
    ModelInput=ModelInput,
    TensorData=TensorData,
    Datum=Datum,
    SamplingParams=lambda **named: SimpleNamespace(**named),
    AdamParams=lambda **named: SimpleNamespace(**named),
)


def _folder() -> Path:
    return Path(os.environ["FAKE_TINKER"])


def _rule() -> str:
    file = _folder() / "rule"
    return file.read_text() if file.exists() else "sum"


def _failing(call: str) -> None:
    file = _folder() / f"fail-{call}"
    if file.exists():
        file.unlink()
        raise ValueError(f"Error retrieving result: Error code: 503 - {{'detail': '{call} is overloaded'}}")


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class SamplingClient:
    def __init__(self, model: Qwen3) -> None:
        self._core = EmbeddedCore(model, EngineOptions(max_context=model.max_positions))
        self._lock = threading.Lock()

    def sample(self, *, prompt: ModelInput, num_samples: int, sampling_params: Any) -> Future[Any]:
        assert num_samples == 1
        future: Future[Any] = Future()
        threading.Thread(target=self._run, args=(prompt, sampling_params, future), daemon=True).start()
        return future

    def _run(self, prompt: ModelInput, wanted: Any, future: Future[Any]) -> None:
        params = SamplingParams(
            max_tokens=wanted.max_tokens, temperature=wanted.temperature, stop_ids=frozenset(wanted.stop)
        )
        key = RequestKey(seed=wanted.seed, rollout_id="x", turn=0)
        found: list[Generation | EngineError] = []
        with self._lock:
            try:
                _failing("sample")
                self._core.submit(np.array(prompt.ids, np.int32), params, key, found.append)
                while not found:
                    self._core.step()
            except Exception as error:  # noqa: BLE001 - any failure is the future's
                future.set_exception(error)
                return
        one = found[0]
        if isinstance(one, EngineError):
            future.set_exception(one)
            return
        assert one.logprobs is not None
        sequence = SimpleNamespace(
            tokens=one.ids.tolist(), logprobs=[float(x) for x in one.logprobs], stop_reason=one.finish
        )
        future.set_result(SimpleNamespace(sequences=[sequence]))


class TrainingClient:
    def __init__(self, base: str) -> None:
        self.model_id = f"model_{uuid.uuid4().hex[:8]}"
        self.model = load_model(Path(base))
        self.adam = torch.optim.AdamW(self.model.parameters(), lr=0.0)
        self.rows = 0
        self.asked = False
        """Something was asked of these adapters."""

    def _logprobs(self, datum: Datum) -> torch.Tensor:
        ids = torch.tensor([datum.model_input.ids])
        targets = torch.tensor(datum.loss_fn_inputs["target_tokens"].data)
        logits = self.model.logits(self.model.hidden(ids[0, :0], ids))[0]
        found: torch.Tensor = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
        return found

    def _ask(self, call: str) -> None:
        self.asked = True
        _failing(call)

    def _outputs(self, found: list[torch.Tensor]) -> Future[Any]:
        outputs = [{"logprobs": TensorData(f.tolist(), "float32", [len(f)])} for f in found]
        return _done(SimpleNamespace(loss_fn_outputs=outputs, metrics={}))

    def forward(self, data: list[Datum], loss_fn: str) -> Future[Any]:
        self._ask("forward")
        assert loss_fn == "importance_sampling"
        with torch.no_grad():
            return self._outputs([self._logprobs(datum) for datum in data])

    def forward_backward(self, data: list[Datum], loss_fn: str) -> Future[Any]:
        self._ask("forward_backward")
        assert loss_fn == "importance_sampling"
        found = []
        for datum in data:
            logp = self._logprobs(datum)
            old = torch.tensor(datum.loss_fn_inputs["logprobs"].data)
            advantages = torch.tensor(datum.loss_fn_inputs["advantages"].data)
            loss = -((logp - old).exp() * advantages).sum()
            loss = loss / {"sum": 1, "skyrl": len(logp), "root": len(logp) ** 0.5}[_rule()]
            loss.backward()
            found.append(logp.detach())
        self.rows += len(data)
        return self._outputs(found)

    def optim_step(self, adam: Any) -> Future[Any]:
        self._ask("optim_step")
        parameters = list(self.model.parameters())
        if _rule() == "skyrl":
            for parameter in parameters:
                assert parameter.grad is not None
                parameter.grad.div_(self.rows)
        if adam.grad_clip_norm:
            torch.nn.utils.clip_grad_norm_(parameters, adam.grad_clip_norm)
        self.adam.param_groups[0].update(
            lr=adam.learning_rate,
            betas=(adam.beta1, adam.beta2),
            eps=adam.eps,
            weight_decay=adam.weight_decay,
        )
        self.adam.step()
        self.adam.zero_grad()
        self.rows = 0
        return _done(SimpleNamespace(metrics=None))

    def save_state(self, name: str) -> Future[Any]:
        self._ask("save_state")
        path = _folder() / f"{self.model_id}-{name}.pt"
        torch.save([self.model.state_dict(), self.adam.state_dict()], path)
        return _done(SimpleNamespace(path=f"tinker://{path.name}"))

    def load_state_with_optimizer(self, path: str) -> Future[Any]:
        if self.asked and (_folder() / "load-first").exists():
            raise ValueError("Error code: 400 - {'detail': 'LoadWeights is not permitted with seq_id 7'}")
        self._ask("load_state")
        weights, adam = torch.load(_folder() / path.removeprefix("tinker://"), weights_only=True)
        self.model.load_state_dict(weights)
        self.adam.load_state_dict(adam)
        return _done(SimpleNamespace(path=path))

    def save_weights_for_sampler(self, name: str) -> Future[Any]:
        self._ask("save_weights_for_sampler")
        path = f"tinker://{self.model_id}/{name}"
        _models[path] = copy.deepcopy(self.model)
        return _done(SimpleNamespace(path=path))


class ServiceClient:
    def __init__(self, *, api_key: str, base_url: str = "") -> None:
        assert api_key
        if base_url.endswith(":1"):
            raise ConnectionError(f"connection to {base_url} refused")

    def create_sampling_client(self, *, base_model: str = "", model_path: str = "") -> SamplingClient:
        return SamplingClient(_models[model_path] if model_path else load_model(Path(base_model)))

    def create_lora_training_client(self, *, base_model: str, rank: int, seed: int) -> TrainingClient:
        _failing("create")
        assert rank > 0
        return TrainingClient(base_model)
