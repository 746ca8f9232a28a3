"""What attention asks of a GPU's kernels, seen on tensors without content: calls and shapes, no numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from insitu_train.attention import rows
from insitu_train.attention.rows import Causal, Shared
from insitu_train.attention.tree import Piece, TreeAttend, by_pieces

pytestmark = pytest.mark.slow

HEADS, KV_HEADS, WIDTH = 6, 2, 8
FORWARD = torch.ops.aten._scaled_dot_product_flash_attention.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
EFFICIENT = torch.ops.aten._efficient_attention_forward.default


class Calls(TorchDispatchMode):
    """Keeps the arguments of the kernels called."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[Any, list[tuple[Any, ...]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.made.setdefault(func, []).append(args)
        return func(*args, **(kwargs or {}))

    def heads(self, func: Any, at: int) -> set[int]:
        return {int(args[at].shape[1]) for args in self.made[func]}


def qkv(tokens: int, dtype: torch.dtype, width: int = WIDTH) -> list[Tensor]:
    shapes = [(HEADS, tokens, width), (KV_HEADS, tokens, width), (KV_HEADS, tokens, width)]
    return [torch.empty(*s, dtype=dtype, device="meta", requires_grad=True) for s in shapes]


def test_a_tree_gives_the_flash_kernels_grouped_views_and_no_sequence_offsets() -> None:
    """The backward kernel takes any tensor of offsets, an empty one too, for a batch of packed sequences."""
    leaves = qkv(30, torch.bfloat16)
    pieces = (Piece(0, 20, 0, 20, True), Piece(20, 30, 20, 30, True), Piece(20, 30, 0, 10, False))
    with Calls() as calls:
        TreeAttend(pieces)(*leaves, 0.3).sum().backward()  # type: ignore[no-untyped-call]
    assert [calls.heads(FORWARD, at) for at in (0, 1, 2)] == [{HEADS}, {KV_HEADS}, {KV_HEADS}]
    assert [calls.heads(BACKWARD, at) for at in (1, 2, 3)] == [{HEADS}, {KV_HEADS}, {KV_HEADS}]
    assert len(calls.made[BACKWARD]) == len(pieces)
    assert all(args[6:8] == (None, None) for args in calls.made[BACKWARD])
    assert not [func for func in calls.made if "repeat" in str(func)]
    assert [t.grad.shape for t in leaves if t.grad is not None] == [t.shape for t in leaves]


@pytest.mark.parametrize(("dtype", "repeated"), [(torch.float32, True), (torch.bfloat16, False)])
def test_only_float32_repeats_grouped_keys_and_the_memory_model_sees_it(
    dtype: torch.dtype, repeated: bool
) -> None:
    for attend in (Causal(), Shared(6, 4)):
        with Calls() as calls:
            attend(*qkv(30, dtype), 0.3).sum().backward()  # type: ignore[no-untyped-call]
        assert calls.heads(FORWARD, 1) == {HEADS if repeated else KV_HEADS}


def test_float32_on_a_gpu_never_holds_all_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel of torch has float32 and grouped keys but the one that holds them all, and a mask of
    queries x keys is as large."""
    asked: list[tuple[int, bool, bool]] = []

    def attention(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Tensor:
        asked.append((k.shape[1], more["enable_gqa"], more["attn_mask"] is not None))
        return torch.empty_like(q)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    monkeypatch.setattr(rows, "emulated", rows._stock)
    with Calls() as calls:
        Causal()(*qkv(30, torch.float32), 0.3)
        Shared(6, 4)(*qkv(30, torch.float32), 0.3)
    assert asked == [(HEADS, False, False)] * 2  # a row alone; the prefix of the others
    (args,) = calls.made[EFFICIENT]
    assert [tuple(x.shape) for x in args[:3]] == [(4, n, HEADS, WIDTH) for n in (6, 12, 12)]


def test_half_precision_names_its_kernel_whatever_torch_prefers(monkeypatch: pytest.MonkeyPatch) -> None:
    """From torch 2.11 on the choice would be cuDNN's where there are as many queries as keys."""

    def chosen_by_torch(*given: Any, **more: Any) -> Tensor:
        raise AssertionError("torch chose the kernel")

    monkeypatch.setattr(F, "scaled_dot_product_attention", chosen_by_torch)
    monkeypatch.setattr(rows, "emulated", rows._stock)
    for attend, calls_of_it in ((Causal(), 1), (Shared(0, 5), 1), (Shared(6, 4), 2)):
        with Calls() as calls:
            attend(*qkv(30, torch.bfloat16), 0.3)
        assert len(calls.made[FORWARD]) == calls_of_it


@pytest.mark.parametrize(("capability", "width"), [((7, 5), WIDTH), ((9, 0), 512)])
def test_a_gpu_without_the_flash_kernel_gets_another_one(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], width: int
) -> None:
    """The flash kernel needs Ampere and head_dim <= 256, the memory-efficient one Ampere for bfloat16."""
    asked: list[tuple[int, bool]] = []

    def attention(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Tensor:
        asked.append((k.shape[1], more["attn_mask"] is not None))
        return torch.empty_like(q)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    monkeypatch.setattr(rows, "emulated", rows._stock)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    with Calls() as calls:
        Causal()(*qkv(30, torch.bfloat16, width), 0.3)
        Shared(6, 4)(*qkv(30, torch.bfloat16, width), 0.3)
    assert FORWARD not in calls.made
    old = capability < (8, 0)
    # a row alone; the prefix of the others; those rows, where no kernel aligns the last query and key
    assert sorted(asked) == sorted([(HEADS, False)] * 2 + [(HEADS, True)] * old)
    assert (EFFICIENT in calls.made) is not old
    pieces = (Piece(0, 1000, 0, 1000, True),)
    assert not by_pieces(pieces, "cuda", torch.bfloat16, width)
    assert by_pieces(pieces, "cpu", torch.bfloat16, width)
