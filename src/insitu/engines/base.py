"""An Engine is a token-in/token-out sampler with a control plane.

Contract: ids are exactly those sampled; one finite logprob <= 0 per id, of the distribution that was sampled,
or None for the whole reply when the tokens are demonstrated (scripted). Cancelling the coroutine of
`generate` aborts the request at the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from insitu.types import Generation, IntArray, RequestKey, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Properties reported by an engine; checked by the start-up probe."""

    name: str
    max_context_tokens: int
    """Prompt plus sampled tokens of one request."""
    model: str = ""
    """Name of the model at a server."""
    versions: Literal["", "token", "reply"] = ""
    """What a server names a weight version for: each token, or a whole reply."""
    kind: str = "sampled"
    """`sampled`, or `demonstrated` for a scripted policy (no logprobs, never trained by RL)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """Proof that an engine holds a weight set; the gateway stamps no version without one."""

    version: int
    checksum: str
    """Hex digest over all tensors in name order."""
    tensors: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Hex digest of each tensor by its published name; empty if unknown."""


PauseMode = Literal["wait", "abort", "keep"]
"""What happens to running requests: they finish, are aborted, or are frozen until `resume`."""


@runtime_checkable
class Engine(Protocol):
    """Sampler and control plane."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def receipt(self) -> Receipt:
        """Of the weights now in force."""

    async def generate(self, ids: IntArray, params: SamplingParams, key: RequestKey) -> Generation:
        """Sample a continuation of `ids`. Raises EngineError."""

    async def pause(self) -> None:
        """Stop starting new work and wait until nothing is in flight."""

    async def resume(self) -> None: ...

    async def close(self) -> None: ...


@runtime_checkable
class LoadingEngine(Engine, Protocol):
    """An engine that can load other weights (a server)."""

    async def load(self, folder: Path, version: int, *, mode: PauseMode = "wait") -> Receipt:
        """Load the model folder, clear the prefix cache, set and verify the version; raise EngineError."""

    async def version(self) -> int:
        """Query the version of the engine's current weights."""

    async def recognise(self) -> Receipt:
        """Restore the version label after a restart of a server that nothing was published to.

        Raises EngineError when its weights are known to be others.
        """

    async def has_own_head(self) -> bool:
        """Return whether the output head is a separate tensor though the model ties it to the embeddings."""

    async def sleep(self) -> None:
        """Release the GPU memory: running calls finish first, new ones wait for `wake`."""

    async def wake(self) -> None:
        """Reclaim the GPU memory, with the same weights and version."""


@runtime_checkable
class TracksSessions(Protocol):
    """An engine that keeps something for each session."""

    def release(self, session: str) -> None:
        """Forget a session (the rollout id of its requests) that has ended."""
