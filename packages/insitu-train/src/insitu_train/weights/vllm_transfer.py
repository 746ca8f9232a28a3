"""New weights for a vLLM server straight from the trainer's GPU: CUDA IPC, or NCCL, without files.

Written to vLLM 0.32's weight-transfer API (init, start, update, finish) and tested against the shipped fake;
it needs GPUs and has not run on any. IPC handles are pickled, so the server needs
VLLM_ALLOW_INSECURE_SERIALIZATION=1 and must accept connections from the trainer's machine only. NCCL has no
timeout: the trainer's half runs beside the server's call, and both have one.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from insitu.concurrency import run_all
from insitu.engines.base import PauseMode, Receipt
from insitu.engines.vllm import VllmEngine
from insitu.engines.vllm_control import Proof
from insitu.engines.weight_mapping import WeightMapping, map_weights
from insitu.errors import EngineError

_WIDTHS: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one value, as torch names its type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferLayout:
    """The tensors to transfer, in order."""

    names: Sequence[str]
    dtypes: Sequence[str]
    """As torch names them: bfloat16."""
    shapes: Sequence[Sequence[int]]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        pairs = zip(self.dtypes, self.shapes, strict=True)
        return sum(_WIDTHS.get(dtype, 4) * math.prod(shape) for dtype, shape in pairs)

    def info(self) -> dict[str, object]:
        return {
            "names": list(self.names),
            "dtype_names": list(self.dtypes),
            "shapes": [list(shape) for shape in self.shapes],
        }


Beside = Callable[[], Awaitable[object]]
"""The trainer's half of a collective step."""
Summed = Callable[[Sequence[Sequence[str]]], Awaitable[Sequence[str]]]
"""Sums over tensors laid one after the other, per list of names."""


async def world_size(engine: VllmEngine) -> int:
    """Workers of the server."""
    found = (await engine.http.get("/get_world_size")).get("world_size")
    if type(found) is not int or found < 1:
        raise EngineError("vllm /get_world_size names no number of workers")
    return found


async def initialise(engine: VllmEngine, info: Mapping[str, object], beside: Beside | None = None) -> None:
    """Initialise the transfer once per server; raise InsituError."""
    await _post_beside(engine, "/init_weight_transfer_engine", {"init_info": dict(info)}, beside)


async def receive(
    engine: VllmEngine,
    version: int,
    sent: TransferLayout,
    more: Mapping[str, object],
    summed: Summed,
    *,
    mode: PauseMode = "wait",
    beside: Beside | None = None,
) -> Receipt:
    """Sample with the trainer's tensors from now on; `more` is added to the update (IPC handles).

    Raises InsituError: before anything is paused if the names do not match the server's parameters, later
    leaving the server paused and rejecting calls.
    """
    before = await engine.weights.sums()
    fed = map_weights(before.by_name, dict(zip(sent.names, sent.shapes, strict=True)))
    proof = await _proof(fed, sorted(sent.names), summed)
    async with engine.updating(version, mode):
        await _post(engine, "/start_weight_update", None)
        info = {"update_info": {**sent.info(), **more}}
        await _post_beside(engine, "/update_weights", info, beside)
        await _post(engine, "/finish_weight_update", {"weight_version": str(version)})
        return await engine.settle(proof, version, before, mode)


async def _proof(fed: WeightMapping, names: Sequence[str], summed: Summed) -> Proof:
    fused = {name: parts for name, parts in fed.sources.items() if len(parts) > 1}
    sums = await summed([*([name] for name in names), *fused.values()])
    single = dict(zip(names, sums, strict=False))
    whole = dict(zip(fused, sums[len(names) :], strict=True))
    expected = {name: whole.get(name) or single[parts[0]] for name, parts in fed.sources.items()}
    return Proof(sums=single, fed=fed, expected=expected)


async def _post(engine: VllmEngine, path: str, body: Mapping[str, object] | None) -> None:
    await engine.http.post(path, body, deadline_s=engine.http.options.call_deadline_s)


async def _post_beside(
    engine: VllmEngine, path: str, body: Mapping[str, object], beside: Beside | None
) -> None:
    """Post and run `beside` concurrently; if one fails the other is cancelled."""
    await run_all(_post(engine, path, body), *([] if beside is None else [_awaited(beside())]))


async def _awaited(work: Awaitable[object]) -> None:
    await work
