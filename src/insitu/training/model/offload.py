"""Tensors that the backward pass needs later wait in the host's memory.

On CUDA the copies run on a stream of their own beside the computation: out into pinned memory as soon as a
tensor is saved, back one tensor ahead of the backward pass, which asks for them in the reverse order. On a
CPU they are plain copies, so that what depends on it can be tested. Used by model/layers.py.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

PIECE = 1 << 26
"""Bytes of one piece of pinned memory. It is handed out in powers of two: a tensor in one piece could take
nearly twice its size."""


class _Parked:
    """One tensor away from the device."""

    __slots__ = ("back", "before", "dtype", "pieces", "ready", "shape")

    def __init__(self, pieces: list[Tensor], like: Tensor, before: _Parked | None) -> None:
        self.pieces, self.before = pieces, before
        self.shape, self.dtype = like.shape, like.dtype
        self.back: Tensor | None = None
        """On the device again."""
        self.ready: torch.cuda.Event | None = None


class Offload:
    """Parks what is saved for the backward pass within `hooks()`; one per policy and device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._last: _Parked | None = None
        self.bytes = 0
        """Sum over all tensors parked so far."""

    def begin(self) -> None:
        """A new forward: what an earlier one parked and never asked for is let go."""
        self._last = None

    def hooks(self) -> AbstractContextManager[Any]:
        """Within it, floating-point tensors on the device that autograd saves are parked."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> _Parked | Tensor:
        if tensor.device.type != self._device.type or not tensor.is_floating_point() or tensor.dim() < 2:
            return tensor
        self.bytes += tensor.nbytes
        if self._stream is None:
            self._last = _Parked([] if tensor.is_meta else [tensor.clone()], tensor, self._last)
            return self._last
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        pieces = []
        with torch.cuda.stream(self._stream):
            for piece in torch.split(tensor.flatten(), PIECE // tensor.element_size()):
                pieces.append(torch.empty(piece.shape, dtype=piece.dtype, pin_memory=True))
                pieces[-1].copy_(piece, non_blocking=True)
        # its memory must not be given away before the copy has read it
        tensor.record_stream(self._stream)
        self._last = _Parked(pieces, tensor, self._last)
        return self._last

    def _unpack(self, held: _Parked | Tensor) -> Tensor:
        if isinstance(held, Tensor):
            return held
        back = self._fetch(held)
        if held.before is not None:
            self._fetch(held.before)
        if held.ready is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(held.ready)
            back.record_stream(current)
        held.back = held.before = None
        if self._last is held:
            self._last = None
        return back

    def _fetch(self, held: _Parked) -> Tensor:
        """Begin to bring it back, once."""
        if held.back is not None:
            return held.back
        if self._stream is None:
            held.back = held.pieces[0] if held.pieces else self._empty(held)
            return held.back
        with torch.cuda.stream(self._stream):
            held.back = self._empty(held)
            at = 0
            for piece in held.pieces:
                held.back.view(-1)[at : at + len(piece)].copy_(piece, non_blocking=True)
                at += len(piece)
            held.ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            held.ready.record(self._stream)
            return held.back

    def _empty(self, held: _Parked) -> Tensor:
        return torch.empty(held.shape, dtype=held.dtype, device=self._device)
