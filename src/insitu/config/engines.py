"""The table [engine]: the sampler, and which keys each kind uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from insitu.config.base import Count, CountOrZero, OwnPath, Seconds, SecondsOrZero, Table
from insitu.types import MIN_TEMPERATURE


class EngineTable(Table):
    """The sampler."""

    kind: Literal["embedded", "vllm", "sglang", "external", "upstream"] = "embedded"
    """embedded = in the learner; vllm, sglang = a server; external = a trainer; upstream = a provider."""
    temperature: Annotated[float, Field(ge=MIN_TEMPERATURE)] = 1.0
    """Sampling temperature in training and evaluation, and of the trainer's log-probabilities."""
    max_rows: Annotated[int, Field(ge=8, multiple_of=8)] = 32
    """embedded: requests decoded in one batch; a multiple of 8."""
    threads: Count = 1
    """embedded: torch threads while sampling."""
    url: str = ""
    """vllm, sglang, upstream: URL of the server, e.g. http://127.0.0.1:8000; a trailing /v1 is dropped."""
    key_env: str = ""
    """Not embedded: environment variable with the server's, trainer's or provider's key; empty = none."""
    call_timeout_s: Seconds = 600.0
    """Not embedded: timeout of one generation, at the gateway too, and of one weight reload."""
    control_timeout_s: Seconds = 30.0
    """vllm, sglang: timeout of any other call."""
    retries: CountOrZero = 3
    """vllm, sglang: retries of a request that the server has not started."""
    start_timeout_s: SecondsOrZero = 60.0
    """vllm, sglang: seconds that a run waits at its start for the server to come up; 0 = none."""
    reconnect_timeout_s: Seconds = 300.0
    """vllm, sglang: seconds that a server that went down may take to come back (publish disk or delta)."""
    publish: Literal["disk", "delta", "ipc", "nccl"] = "disk"
    """vllm, sglang: how new weights are sent: whole files, differences; vllm: ipc on one GPU, nccl."""
    publish_dir: OwnPath = ""
    """vllm, sglang: folder for published weights, at the same path on the server; empty = in the run."""
    publish_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """vllm, sglang: type of published weights; auto = that of the model's config.json."""
    publish_lora: Literal["adapter", "merged"] = "adapter"
    """vllm: publish adapters (policy.lora_rank) as they are, or merged into the weights (sglang: always)."""
    publish_mode: Literal["keep", "wait"] = "keep"
    """vllm, sglang: running calls continue with the new weights, or finish with the old ones first."""
    share_gpu: bool = False
    """vllm, sglang: the server sleeps while the trainer works, so that both share one GPU."""

    listen: str = "127.0.0.1:0"
    """external: address where the trainer fetches requests; port 0 takes a free one."""
    model: str = ""
    """upstream: name of the provider's model that agents request."""
    requests_per_minute: CountOrZero = 0
    """upstream: most requests of all sessions in one minute; 0 = no limit."""
    max_concurrent: Count = 16
    """upstream: most concurrent requests."""
    max_wait_s: Annotated[float, Field(ge=0)] = 120.0
    """upstream: seconds a call may wait for rate limits and a busy provider; 0 = it fails at once."""
    max_cost: Annotated[float, Field(ge=0)] = 0.0
    """upstream: cost, in the unit of the prices, above which every call is rejected; 0 = no limit."""
    input_price: Annotated[float, Field(ge=0)] = 0.0
    """upstream: price of a million prompt tokens."""
    cached_price: Annotated[float, Field(ge=0)] = 0.0
    """upstream: price of a million cached prompt tokens; 0 = input_price."""
    cache_write_price: Annotated[float, Field(ge=0)] = 0.0
    """upstream: price of a million prompt tokens written to the cache (Anthropic); 0 = input_price."""
    output_price: Annotated[float, Field(ge=0)] = 0.0
    """upstream: price of a million sampled tokens."""

    @model_validator(mode="after")
    def _fits_kind(self) -> Self:
        for key, kinds in ENGINE_KEYS.items():
            default = type(self).model_fields[key].default
            if self.kind not in kinds and self.__dict__[key] != default:
                raise ValueError(
                    f"{key} has no effect with kind = {self.kind!r}, only with {', '.join(kinds)}"
                )
        if self.kind in ENGINE_KEYS["url"] and not self.url:
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


_SERVERS, _UPSTREAM = ("vllm", "sglang"), ("upstream",)
ENGINE_KEYS: Mapping[str, tuple[str, ...]] = {
    "max_rows": ("embedded",),
    "threads": ("embedded",),
    "url": (*_SERVERS, "upstream"),
    "key_env": (*_SERVERS, "external", "upstream"),
    "call_timeout_s": (*_SERVERS, "external", "upstream"),
    "control_timeout_s": _SERVERS,
    "retries": _SERVERS,
    "start_timeout_s": _SERVERS,
    "reconnect_timeout_s": _SERVERS,
    "publish": _SERVERS,
    "publish_dir": _SERVERS,
    "publish_dtype": _SERVERS,
    "publish_lora": ("vllm",),
    "publish_mode": _SERVERS,
    "share_gpu": _SERVERS,
    "listen": ("external",),
    "model": _UPSTREAM,
    "requests_per_minute": _UPSTREAM,
    "max_concurrent": _UPSTREAM,
    "max_wait_s": _UPSTREAM,
    "max_cost": _UPSTREAM,
    "input_price": _UPSTREAM,
    "cached_price": _UPSTREAM,
    "cache_write_price": _UPSTREAM,
    "output_price": _UPSTREAM,
}
"""Keys of [engine] used by some kinds only; all kinds use the others."""
