"""The table [engine]: the sampler, and which keys each kind uses."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from insitu.config.base import (
    Count,
    CountOrZero,
    EngineName,
    Keys,
    OwnPath,
    Seconds,
    SecondsOrZero,
    Table,
    only,
)
from insitu.registry import BUILT_IN
from insitu.types import MIN_TEMPERATURE

_EMBEDDED = only("kind", "embedded")
_KNOWN = BUILT_IN["engines"]
_SERVER = only("kind", "vllm", "sglang", known=_KNOWN)
_PROVIDER = only("kind", "upstream")
_REMOTE = only("kind", "vllm", "sglang", "external", "upstream", known=_KNOWN)


class ProviderKeys(Keys):
    """A provider and the operator's limits, over all sessions."""

    url: Annotated[str, only("kind", "vllm", "sglang", "upstream", known=_KNOWN)] = ""
    """URL of the server, e.g. http://127.0.0.1:8000; a trailing /v1 is dropped."""
    model: Annotated[str, _PROVIDER] = ""
    """Name of the provider's model that agents request."""
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
    """embedded = in the learner; vllm, sglang = a server; external = a trainer; upstream = a provider; or an
    own one, as entry point, module:attribute or file.py:attribute."""
    temperature: Annotated[float, Field(ge=MIN_TEMPERATURE)] = 1.0
    """Sampling temperature in training and evaluation, and of the trainer's log-probabilities."""
    max_rows: Annotated[int, Field(ge=8, multiple_of=8), _EMBEDDED] = 32
    """Requests decoded in one batch; a multiple of 8."""
    threads: Annotated[Count, _EMBEDDED] = 1
    """Torch threads while sampling."""
    key_env: Annotated[str, _REMOTE] = ""
    """Environment variable with the server's, trainer's or provider's key; empty = none."""
    call_timeout_s: Annotated[Seconds, _REMOTE] = 600.0
    """Timeout of one generation, at the gateway too, and of one weight reload."""
    control_timeout_s: Annotated[Seconds, _SERVER] = 30.0
    """Timeout of any other call."""
    retries: Annotated[CountOrZero, _SERVER] = 3
    """Retries of a request that the server has not started."""
    start_timeout_s: Annotated[SecondsOrZero, _SERVER] = 60.0
    """Seconds that a run waits at its start for the server to come up; 0 = none."""
    reconnect_timeout_s: Annotated[Seconds, _SERVER] = 300.0
    """Seconds that a server that went down may take to come back (publish disk or delta)."""
    publish: Annotated[Literal["disk", "delta", "ipc", "nccl"], _SERVER] = "disk"
    """How new weights are sent: whole files, differences; vllm: ipc on one GPU, nccl."""
    publish_dir: Annotated[OwnPath, _SERVER] = ""
    """Folder for published weights, at the same path on the server; empty = in the run."""
    publish_dtype: Annotated[Literal["auto", "float32", "bfloat16"], _SERVER] = "auto"
    """Type of published weights; auto = that of the model's config.json."""
    publish_lora: Annotated[Literal["adapter", "merged"], only("kind", "vllm")] = "adapter"
    """Publish adapters (policy.lora_rank) as they are, or merged into the weights (sglang: always)."""
    publish_mode: Annotated[Literal["keep", "wait"], _SERVER] = "keep"
    """Running calls continue with the new weights, or finish with the old ones first."""
    share_gpu: Annotated[bool, _SERVER] = False
    """The server sleeps while the trainer works, so that both share one GPU."""

    listen: Annotated[str, only("kind", "external")] = "127.0.0.1:0"
    """Address where the trainer fetches requests; port 0 takes a free one."""
    input_price: Annotated[float, Field(ge=0), _PROVIDER] = 0.0
    """Price of a million prompt tokens."""
    cached_price: Annotated[float, Field(ge=0), _PROVIDER] = 0.0
    """Price of a million cached prompt tokens; 0 = input_price."""
    cache_write_price: Annotated[float, Field(ge=0), _PROVIDER] = 0.0
    """Price of a million prompt tokens written to the cache (Anthropic); 0 = input_price."""
    output_price: Annotated[float, Field(ge=0), _PROVIDER] = 0.0
    """Price of a million sampled tokens."""

    @model_validator(mode="after")
    def _fits_kind(self) -> Self:
        if self.kind in ("vllm", "sglang", "upstream") and not self.url:
            raise ValueError(f"kind = {self.kind!r} needs url")
        if self.publish in ("ipc", "nccl"):
            if self.kind != "vllm":
                raise ValueError(f"publish = {self.publish!r} is for vllm, not for {self.kind}")
            if self.publish_dir or self.publish_dtype != "auto":
                raise ValueError(f"publish_dir and publish_dtype have no effect with {self.publish!r}")
        if self.kind == "upstream" and not self.model:
            raise ValueError("kind = 'upstream' needs model: the provider's model that agents request")
        if self.max_cost and not (self.input_price or self.output_price):
            raise ValueError("max_cost needs input_price or output_price")
        return self
