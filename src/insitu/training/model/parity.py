"""The proof that insitu computes what a model of transformers computes, before anything is trained.

The same random ids are read by the model as transformers runs it, and through insitu's attention and head:
long enough that a window or chunk of attention would show, and up to the model's last position, with a row
there beside a row at the first positions, so that position embeddings which depend on what is packed
together show too. What an architecture asks for in its attention mask reaches `mask_function`, which refuses
all but a plain causal one; what it says in its configuration, `check_architecture`. Called by hf.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from insitu.errors import TrainError
from insitu.training.attention.rows import Causal, Shared
from insitu.training.model.base import Attend

NEAR, FAR = 48, 24
"""Random tokens from the first position on, and up to the last one: half of the first are a shared prefix."""
MOST = 2048
"""Tokens of the one long row, where a window or chunk is no shorter."""
_SPANS = ("sliding_window", "attention_chunk_size", "chunk_size", "window_size", "local_attention_window")
"""Keys of a configuration that bound how far attention reaches."""
_LAYERS = frozenset({"full_attention", "attention"})
_ROPE_BY_LENGTH = frozenset({"dynamic", "longrope"})


class Runs(Protocol):
    """As much of a policy as is proved."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def head_weight(self) -> Tensor: ...

    def flat(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor: ...


def check_architecture(config: Any) -> None:
    """Raise TrainError for a configuration that says that insitu cannot train it, before weights are read."""
    kind = config.model_type
    if config.get_text_config() is not config:
        raise TrainError(f"{kind} is a model of more than text: insitu trains language models of text only")
    others = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYERS)
    if others:
        raise TrainError(f"{kind} has layers of type {', '.join(others)}: insitu trains full_attention only")
    found = sorted(_ROPE_BY_LENGTH & set(_rope_types(getattr(config, "rope_parameters", None))))
    if found:
        raise TrainError(
            f"{kind} has rope_type {found[0]}, whose angles depend on the longest row of a pass in"
            " transformers and on its longest context in an engine: not served"
        )


def _rope_types(parameters: object) -> Iterator[str]:
    """Of one set of parameters, or of one for each type of layer."""
    if isinstance(parameters, Mapping):
        if isinstance(named := parameters.get("rope_type"), str):
            yield named
        for nested in parameters.values():
            yield from _rope_types(nested)


def mask_function(
    *, q_length: int, kv_length: int, mask_function: Callable[..., Any], device: Any, **given: Any
) -> Tensor | None:
    """transformers' side: None for a plain causal mask. For another one something that an attention function
    refuses if a layer uses it: some models make masks for layers that they do not have."""
    from transformers.masking_utils import causal_mask_function

    plain = mask_function is causal_mask_function and given.get("allow_is_causal_skip", True)
    return None if plain and q_length == kv_length else torch.zeros(1, 1, 1, 1, device=device)


def bounds(config: Any) -> str:
    """What a configuration says of how far attention reaches, for a person; empty when nothing."""
    found = [f"{name} = {span}" for name in _SPANS if (span := getattr(config, name, None))]
    return f" ({', '.join(found)})" if found else ""


def own_logprobs(model: Any) -> tuple[Tensor, ...]:
    """What `logprobs` gives, of the model as transformers runs it."""
    near, far, long = _ids(model.get_output_embeddings().weight.shape[0], _long(model.config))
    last = last_position(model.config)
    half = NEAR // 2
    model.eval()
    found = _own(model, near, torch.arange(NEAR))[half:]
    beyond = _own(model, torch.cat([near[:half], far]), _far_positions(last))[half:]
    return found, beyond, _own(model, long, torch.arange(len(long)))[-half:]


def _own(model: Any, ids: Tensor, positions: Tensor) -> Tensor:
    with torch.no_grad():
        found = model(
            input_ids=ids.to(model.device)[None],
            # given, since positions that leap would be taken for several sequences
            attention_mask=torch.ones(1, len(ids), dtype=torch.long, device=model.device),
            position_ids=positions.to(model.device)[None],
            use_cache=False,
        )
        return torch.log_softmax(found.logits[0].float(), -1).cpu()


def logprobs(policy: Runs, model: Any) -> tuple[Tensor, ...]:
    """Over the vocabulary: of a row at the first positions behind a shared prefix, of a row at the last ones
    beside it, and of the end of a long row alone."""
    near, far, long = _ids(policy.vocab_size, _long(model.config))
    half = NEAR // 2
    positions = torch.cat([torch.arange(NEAR), _far_positions(last_position(model.config))[half:]])
    packed = _through(policy, torch.cat([near, far]), positions, Shared(half, 2))
    alone = _through(policy, long, torch.arange(len(long)), Causal())
    return packed[half:NEAR], packed[NEAR:], alone[-half:]


def _through(policy: Runs, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
    with torch.no_grad():
        hidden = policy.flat(ids, positions, attend)
        return torch.log_softmax(hidden @ policy.head_weight.T, -1).cpu()


def _far_positions(last: int) -> Tensor:
    """A prefix at the first positions, then a row that ends at the model's last."""
    return torch.cat([torch.arange(NEAR // 2), torch.arange(max(NEAR // 2, last - FAR), last)[:FAR]])


def last_position(config: Any) -> int:
    """Tokens of the longest row that a model takes."""
    return int(config.max_position_embeddings)


def _long(config: Any) -> int:
    """Tokens of a row that is longer than whatever bounds attention, as far as the configuration says."""
    spans = [getattr(config, name, None) for name in _SPANS]
    longest = max((s for s in spans if isinstance(s, int)), default=0)
    return max(NEAR, min(longest + NEAR, MOST, last_position(config)))


def _ids(vocab: int, long: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    near = torch.randint(0, vocab, (NEAR,), generator=generator)
    far = torch.randint(0, vocab, (FAR,), generator=generator)
    return near, far, torch.randint(0, vocab, (long,), generator=generator)


def prove(own: tuple[Tensor, ...], found: tuple[Tensor, ...], name: str, limit: float) -> None:
    """Raise TrainError when one log-probability differs by more than `limit`."""
    where = ("", " at its last positions", " in a long row")
    for ours, theirs, place in zip(found, own, where, strict=True):
        worst = float((ours - theirs).abs().max())
        if not worst <= limit:
            raise TrainError(
                f"{name}: log-probabilities through insitu's attention and head differ by {worst:.3g} from"
                f" the model's own{place}, over the limit of {limit:g}: not an architecture insitu trains"
            )
