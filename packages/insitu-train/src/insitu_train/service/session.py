"""The Tinker SDK behind the few calls that insitu makes.

    Service ----sampler(path)----> ServiceSampler.sample(ids, ...) -> a future
            ----train()----------> TrainingRun: logprobs, backward, update, save, load, publish

Every error of the SDK becomes an EngineError of one line. The SDK repeats requests that met a rate limit or
an overloaded service. `tinker` is imported when a Service is opened.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from insitu.config.training import OptimizerKeys
from insitu.errors import ConfigError, EngineError
from insitu.install_hints import install_extra
from insitu.types import FloatArray, IntArray, SamplingParams
from insitu_train.options import ServiceOptions

EPS = 1e-8
"""Of AdamW, as in local training."""
_LOSS = "importance_sampling"
_NO_KEY = "tml-none"
"""A service of one's own takes any key; the SDK refuses an empty one."""
_RETRY_S = 10.0
_FULL = "Maximum number of LoRA adapters"
_NEW_ONLY = "LoadWeights is not permitted"


class ServiceSampler:
    """One set of weights that the service samples with."""

    def __init__(self, sdk: Any, client: Any) -> None:
        self._sdk, self._client = sdk, client

    def sample(self, ids: IntArray, params: SamplingParams, seed: int) -> Future[Any]:
        """Request one continuation; the future's result is the SDK's SampleResponse."""
        types = self._sdk.types
        wanted = types.SamplingParams(
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            seed=seed,
            stop=sorted(params.stop_ids),
        )
        with _sdk_errors("sample"):
            future: Future[Any] = self._client.sample(
                prompt=types.ModelInput.from_ints(ids.tolist()), num_samples=1, sampling_params=wanted
            )
        return future


class TrainingRun:
    """LoRA adapters that are trained at the service, with their optimizer."""

    def __init__(self, sdk: Any, service: Any, create: Callable[[], Any]) -> None:
        """Create them. create: returns the SDK's client of new ones."""
        self._sdk, self._service, self._create = sdk, service, create
        self._client = create()

    @property
    def id(self) -> str:
        """Name of the training run at the service."""
        return str(self._client.model_id)

    def logprobs(self, rows: Sequence[IntArray]) -> list[FloatArray]:
        """Return, per row, the log-probability of each token but the first, by the present weights."""
        zeros = [np.zeros(len(ids) - 1, np.float32) for ids in rows]
        return self._run("forward", rows, zeros, zeros)

    def backward(
        self, rows: Sequence[IntArray], logprobs: Sequence[FloatArray], factors: Sequence[FloatArray]
    ) -> list[FloatArray]:
        """Add the gradient of -sum(factors * logprobs); return the log-probabilities.

        logprobs: those of the present weights, as `logprobs` returned them.
        """
        # The service's loss is -exp(logp - logprobs) * advantages, whose slope at logp is -advantages.
        # Its cross-entropy would not do: some servers divide it by the sum of the weights.
        return self._run("forward_backward", rows, logprobs, factors)

    def _run(
        self,
        call: str,
        rows: Sequence[IntArray],
        logprobs: Sequence[FloatArray],
        advantages: Sequence[FloatArray],
    ) -> list[FloatArray]:
        data = [self._datum(*row) for row in zip(rows, logprobs, advantages, strict=True)]
        with _sdk_errors(call):
            outputs = getattr(self._client, call)(data, _LOSS).result().loss_fn_outputs
            found = [np.array(out["logprobs"].data, np.float32) for out in outputs]
        lengths, wanted = [len(f) for f in found], [len(ids) - 1 for ids in rows]
        if lengths != wanted or not all(np.isfinite(f).all() for f in found):
            raise EngineError(f"training service: {call} returned no finite log-probability for each token")
        return found

    def _datum(self, ids: IntArray, logprobs: FloatArray, advantages: FloatArray) -> Any:
        types = self._sdk.types

        def tensor(values: np.ndarray[Any, Any], dtype: str) -> Any:
            return types.TensorData(data=values.tolist(), dtype=dtype, shape=[len(values)])

        return types.Datum(
            model_input=types.ModelInput.from_ints(ids[:-1].tolist()),
            loss_fn_inputs={
                "target_tokens": tensor(ids[1:], "int64"),
                "logprobs": tensor(logprobs, "float32"),
                "advantages": tensor(advantages, "float32"),
            },
        )

    def update(self, optim: OptimizerKeys, lr: float, eps: float = EPS) -> None:
        """Apply the accumulated gradient and clear it. lr replaces the one of `optim`."""
        beta1, beta2 = optim.betas
        with _sdk_errors("optim_step"):
            parameters = self._sdk.types.AdamParams(
                learning_rate=lr,
                beta1=beta1,
                beta2=beta2,
                eps=eps,
                weight_decay=optim.weight_decay,
                grad_clip_norm=optim.grad_clip,
            )
            self._client.optim_step(parameters).result()

    def save(self, name: str) -> str:
        """Save weights and optimizer; return their path at the service."""
        with _sdk_errors("save_state"):
            return str(self._client.save_state(name=name).result().path)

    def load(self, path: str) -> None:
        """Load weights and optimizer from a path at the service; some take it only as the first request."""
        with _sdk_errors(f"load {path}"):
            self._client.load_state_with_optimizer(path).result()

    def restart(self, saved: str) -> None:
        """Return to the adapters as they were created, and `saved` then.

        Where the service loads into new adapters only (SkyRL from 0.4, which names the hosted service as its
        model), others are created, of the same seed, and the old ones stay until the session ends.
        """
        try:
            self.load(saved)
        except EngineError as error:
            if _NEW_ONLY not in str(error):
                raise
            self._client = self._create()

    def publish(self, name: str) -> tuple[str, ServiceSampler]:
        """Save the weights for sampling; return their path and a sampler of them."""
        with _sdk_errors("save_weights_for_sampler"):
            path = str(self._client.save_weights_for_sampler(name=name).result().path)
            return path, ServiceSampler(self._sdk, self._service.create_sampling_client(model_path=path))


class Service:
    """A connection to the training service.

    Raises ConfigError without the SDK, EngineError where the service does not answer.
    """

    def __init__(self, options: ServiceOptions) -> None:
        try:
            self._sdk: Any = import_module("tinker")
        except ImportError as error:
            raise ConfigError(f"tinker is not installed: {install_extra('tinker')}") from error
        self._options = options
        key = os.environ.get(options.key_env or "TINKER_API_KEY", "").strip() or _NO_KEY
        address = {"base_url": options.url} if options.url else {}
        with _sdk_errors(f"connect to {options.url or 'the service'} with SDK {self._sdk.__version__}"):
            self._service = self._sdk.ServiceClient(api_key=key, **address)

    def sampler(self) -> ServiceSampler:
        """Return a sampler of the configured model, before any training."""
        model = self._options.model
        named = {"model_path": model} if model.startswith("tinker://") else {"base_model": model}
        with _sdk_errors(f"sample from {model}"):
            return ServiceSampler(self._sdk, self._service.create_sampling_client(**named))

    def train(self, sleep: Callable[[float], None] = time.sleep) -> TrainingRun:
        """Create adapters to train.

        Waits up to `timeout_s` for a service that holds as many as it can: those of a process that was killed
        are removed when their heartbeat is overdue.
        """
        return TrainingRun(self._sdk, self._service, partial(self._adapters, sleep))

    def _adapters(self, sleep: Callable[[float], None]) -> Any:
        options, deadline = self._options, time.monotonic() + self._options.timeout_s
        while True:
            try:
                with _sdk_errors(f"train {options.model} with LoRA rank {options.rank}"):
                    return self._service.create_lora_training_client(
                        base_model=options.model, rank=options.rank, seed=options.seed
                    )
            except EngineError as error:
                if _FULL not in str(error) or time.monotonic() + _RETRY_S > deadline:
                    raise
                sleep(_RETRY_S)


@contextmanager
def _sdk_errors(doing: str) -> Iterator[None]:
    """Raise EngineError for what the SDK raises: its own classes, and plain ones for failed futures."""
    try:
        yield
    except EngineError:
        raise
    except Exception as error:  # the boundary: the SDK raises ValueError, RuntimeError and many others
        line = " ".join(str(error).split()) or type(error).__name__
        raise EngineError(f"training service: {doing}: {line[:400]}") from error
