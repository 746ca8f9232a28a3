"""The table [engine]: the sampler, and which keys each kind uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from insitu.config.base import (
    Address,
    Count,
    CountOrZero,
    EngineName,
    Keys,
    OwnPath,
    Seconds,
    SecondsOrZero,
    Table,
    only,
    split_address,
)
from insitu.registry import shipped
from insitu.types import MIN_TEMPERATURE

_KNOWN = shipped("engines")
_SERVER = only("kind", "vllm", "sglang", known=_KNOWN)
_PROVIDER = only("kind", "upstream")
_NAMED = only("kind", "upstream", "tinker")
_ADDRESSED = only("kind", "vllm", "sglang", "upstream", "tinker", known=_KNOWN)
_LAUNCH = only("kind", "vllm", "sglang")
_REMOTE = only("kind", "vllm", "sglang", "external", "upstream", "tinker", known=_KNOWN)


class ProviderKeys(Keys):
    """A provider and the operator's limits, over all sessions."""

    model: Annotated[str, _NAMED] = ""
    """upstream: name of the provider's model that agents request; tinker: name of the base model at the
    service, or a tinker:// path of trained weights to sample from."""
    requests_per_minute: Annotated[CountOrZero, _PROVIDER] = 0
    """Most requests of all sessions in one minute; 0 = no limit."""
    max_concurrent: Annotated[Count, _PROVIDER] = 16
    """Most concurrent requests."""
    max_wait_s: Annotated[float, Field(ge=0), _PROVIDER] = 120.0
    """Seconds a call may wait for rate limits and a busy provider; 0 = it fails at once."""
    max_cost: Annotated[float, Field(ge=0), _PROVIDER] = 0.0
    """Cost, in the unit of the prices, above which every call is rejected; 0 = no limit."""


class EngineTable(ProviderKeys, Table):
    """The sampler."""

    kind: EngineName = "embedded"
    """embedded = in the learner; vllm, sglang = a server; external = a trainer; tinker = a service that also
    trains; upstream = a provider; or an own one, as entry point, module:attribute or file.py:attribute."""
    temperature: Annotated[float, Field(ge=MIN_TEMPERATURE)] = 1.0
    """Sampling temperature in training and evaluation, and of the trainer's log-probabilities."""
    key_env: Annotated[str, _REMOTE] = ""
    """Environment variable with the server's, trainer's or provider's key; empty = none."""
    call_timeout_s: Annotated[Seconds, _REMOTE] = 600.0
    """Timeout of one generation, at the gateway too, and of one weight reload."""
    urls: Annotated[tuple[str, ...], Field(strict=False), _ADDRESSED] = ()
    """URLs of the servers, all of one model, or of the provider or service; a trailing /v1 is dropped. [] =
    vllm, sglang: the run starts servers, restarts those that die, and ends them; tinker: the SDK's own."""
    replicas: Annotated[Count, _LAUNCH] = 1
    """Servers that are started."""
    gpus: Annotated[tuple[int, ...], Field(strict=False), _LAUNCH] = ()
    """GPUs of the servers, equally many of each in turn, over which it spreads the model (tensor parallel);
    [] = the first ones, one of each, and the CPU without any."""
    python: Annotated[OwnPath, _LAUNCH] = ""
    """Environment or interpreter that has the server; empty = insitu's own."""
    args: Annotated[tuple[str, ...], Field(strict=False), _LAUNCH] = ()
    """Further arguments of the server, e.g. ["--gpu-memory-utilization", "0.8"]."""
    start_timeout_s: Annotated[SecondsOrZero, _SERVER] = 300.0
    """Seconds to wait until a server is up, at the start and when none is left; 0 = none.
    900 without urls."""
    publish: Annotated[Literal["disk", "delta", "ipc", "nccl"], _SERVER] = "disk"
    """How new weights are sent: whole files, differences; vllm: ipc on one GPU, nccl."""
    publish_dir: Annotated[OwnPath, _SERVER] = ""
    """Folder for published weights, at the same path on the server; empty = in the run."""
    publish_dtype: Annotated[Literal["auto", "float32", "bfloat16"], _SERVER] = "auto"
    """Type of published weights; auto = that of the model's config.json."""
    publish_lora: Annotated[Literal["adapter", "merged"], only("kind", "vllm")] = "adapter"
    """Publish adapters (policy.lora_rank) as they are, or merged into the weights (sglang: always)."""
    publish_mode: Annotated[Literal["recompute", "keep", "wait"], _SERVER] = "recompute"
    """What an update does: running calls continue and their context is computed again with the new weights;
    sessions keep theirs for up to collect.max_staleness versions (vllm); or running calls finish first."""
    replay_experts: Annotated[bool, only("kind", "vllm")] = False
    """Keep the experts that the server chose for each token, and train through the same ones. The server
    needs --enable-return-routed-experts."""
    share_gpu: Annotated[bool, _SERVER] = False
    """The server sleeps while the trainer works, so that both share one GPU."""

    prices: Annotated[Mapping[str, Annotated[float, Field(ge=0)]], _NAMED] = {}
    """Prices of a million tokens, e.g. { input = 1.0, output = 5.0 }; upstream: also cached and cache_write
    (Anthropic), else as input; tinker: train, of trained rows: both of their passes, per epoch."""
    listen: Annotated[
        Address, AfterValidator(lambda text: split_address(text) and text), only("kind", "external")
    ] = "127.0.0.1:0"
    """HOST:PORT where the trainer fetches requests; port 0 takes a free one."""

    @property
    def url(self) -> str:
        """The first address; empty without one."""
        return self.urls[0] if self.urls else ""

    @property
    def launch(self) -> bool:
        """Whether the run starts the servers."""
        return self.kind in ("vllm", "sglang") and not self.urls

    @property
    def tensor_parallel(self) -> int:
        """GPUs of one server."""
        return len(self.gpus) // self.replicas or 1

    @property
    def pause_mode(self) -> Literal["keep", "wait"]:
        """Whether running calls are frozen during an update, or finish first."""
        return "wait" if self.publish_mode == "wait" else "keep"

    @property
    def in_learner(self) -> bool:
        """Whether the learner's process opens the sampler and gives it new weights."""
        return self.kind in ("embedded", "tinker")

    @model_validator(mode="before")
    @classmethod
    def _names_servers(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if isinstance(values.get("urls"), str):
            values = {**values, "urls": (values["urls"],)}
        if values.get("kind") in ("vllm", "sglang") and not values.get("urls"):
            values = {"start_timeout_s": 900.0, **values}
        return values

    @model_validator(mode="after")
    def _has_servers(self) -> Self:
        if not {"upstream": len(self.urls) == 1, "tinker": len(self.urls) < 2}.get(self.kind, True):
            raise ValueError(f"kind = {self.kind!r} needs urls: the one address of the provider")
        for key in ("replicas", "gpus", "python", "args") if self.urls else ():
            if self.__dict__[key] != type(self).model_fields[key].default:
                raise ValueError(f"{key} has no effect with urls: it is of servers that insitu starts")
        return self

    @model_validator(mode="after")
    def _fits_kind(self) -> Self:
        if max(len(self.urls), self.replicas) > 1 and self.publish in ("ipc", "nccl"):
            raise ValueError(f"publish = {self.publish!r} reaches one server; publish by disk or delta")
        if len(self.gpus) % self.replicas:
            raise ValueError(
                f"gpus names {len(self.gpus)}, not equally many for each of replicas = {self.replicas}"
            )
        if self.publish in ("ipc", "nccl"):
            if self.kind != "vllm":
                raise ValueError(f"publish = {self.publish!r} is for vllm, not for {self.kind}")
            if self.publish_dir or self.publish_dtype != "auto":
                raise ValueError(f"publish_dir and publish_dtype have no effect with {self.publish!r}")
        if self.kind == "upstream" and not self.model:
            raise ValueError("kind = 'upstream' needs model: the provider's model that agents request")
        if self.kind == "tinker" and not self.model:
            raise ValueError("kind = 'tinker' needs model: the base model at the training service")
        if self.max_cost and not (self.prices.get("input") or self.prices.get("output")):
            raise ValueError("max_cost needs a price of input or output")
        priced = ("cached", "cache_write") if self.kind == "upstream" else ("train",)
        if unknown := self.prices.keys() - {"input", "output", *priced}:
            raise ValueError(f"prices.{min(unknown)} has no effect with kind = {self.kind!r}")
        return self
