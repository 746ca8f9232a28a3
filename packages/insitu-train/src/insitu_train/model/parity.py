"""Parity check: insitu computes what transformers computes, before anything is trained.

The same random ids run through the model as in transformers, and through insitu's attention and head: a long
row, and a row at the model's last positions packed beside one at the first, so that position embeddings that
depend on the packing show. A model that runs by rows reads two rows padded to one length instead.
`mask_function` refuses attention masks that are not plain causal; `check_architecture` refuses by the
configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from insitu.errors import TrainError
from insitu_train.attention.rows import Causal, Shared
from insitu_train.model.base import Attend

NEAR, FAR = 48, 24
"""Random tokens at the first and at the last positions; half of the first are a shared prefix."""
MOST = 2048
"""Most tokens of the long row."""
_SPANS = ("sliding_window", "attention_chunk_size", "chunk_size", "window_size", "local_attention_window")
"""Configuration keys that limit the reach of attention."""
_LAYERS = frozenset({"full_attention", "attention"})
_ROPE_BY_LENGTH = frozenset({"dynamic", "longrope"})


def check_architecture(config: Any) -> None:
    """Raise TrainError for a configuration that insitu cannot train."""
    kind = config.model_type
    if config.get_text_config() is not config:
        raise TrainError(
            f"{kind} is a multimodal model whose text part transformers does not open alone: insitu trains"
            f" text-only language models, here a checkpoint of {config.get_text_config().model_type}"
        )
    found = sorted(_ROPE_BY_LENGTH & set(_rope_types(getattr(config, "rope_parameters", None))))
    if found:
        raise TrainError(
            f"{kind} has rope_type {found[0]}, whose angles depend on the longest row of a pass in"
            " transformers and on its longest context in an engine: not supported"
        )


def opened_config(config: Any) -> Any:
    """Return the configuration that AutoModelForCausalLM opens: the text part of some multimodal models."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    text = config.get_text_config()
    return text if model is not None and issubclass(type(text), model.config_class) else config


def why_by_rows(config: Any) -> str:
    """Return why insitu's attention cannot compute this architecture's layers, or empty."""
    others = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYERS)
    return f"{config.model_type} has layers of type {', '.join(others)}" if others else ""


def _rope_types(parameters: object) -> Iterator[str]:
    """Yield the types of one set of parameters, or of one for each type of layer."""
    if isinstance(parameters, Mapping):
        if isinstance(named := parameters.get("rope_type"), str):
            yield named
        for nested in parameters.values():
            yield from _rope_types(nested)


def mask_function(
    *, q_length: int, kv_length: int, mask_function: Callable[..., Any], device: Any, **given: Any
) -> Tensor | None:
    """Return None for a plain causal mask, else a marker that `attention_function` refuses.

    Not an exception: some models build masks for layers that they do not have.
    """
    from transformers.masking_utils import causal_mask_function

    plain = mask_function is causal_mask_function and given.get("allow_is_causal_skip", True)
    return None if plain and q_length == kv_length else torch.zeros(1, 1, 1, 1, device=device)


def bounds(config: Any) -> str:
    """Format the configured limits of attention; empty when there are none."""
    found = [f"{name} = {span}" for name in _SPANS if (span := getattr(config, name, None))]
    return f" ({', '.join(found)})" if found else ""


def own_logprobs(model: Any) -> tuple[Tensor, ...]:
    """Return the rows of `logprobs`, and a short one, computed by the model as transformers runs it."""
    near, far, long = _ids(model.get_output_embeddings().weight.shape[0], _long(model.config))
    last = last_position(model.config)
    half = NEAR // 2
    model.eval()
    found = _own(model, near, torch.arange(NEAR))[half:]
    beyond = _own(model, torch.cat([near[:half], far]), _far_positions(last))[half:]
    short = _own(model, far, torch.arange(FAR))
    return found, beyond, _own(model, long, torch.arange(len(long)))[-half:], short


def _own(model: Any, ids: Tensor, positions: Tensor) -> Tensor:
    with torch.no_grad():
        found = model(
            input_ids=ids.to(model.device)[None],
            # without it, jumps in positions would be taken for packed sequences
            attention_mask=torch.ones(1, len(ids), dtype=torch.long, device=model.device),
            position_ids=positions.to(model.device)[None],
            use_cache=False,
        )
        return torch.log_softmax(found.logits[0].float(), -1).cpu()


def logprobs(policy: Any, model: Any) -> tuple[Tensor | None, ...]:
    """Return log-probabilities over the vocabulary of rows through a `HfPolicy`.

    One at the first positions after a shared prefix, one at the last positions packed beside it, and the end
    of a long row alone. By rows: the first, the third, and a short one padded to the first's length.
    """
    near, far, long = _ids(policy.vocab_size, _long(model.config))
    half = NEAR // 2
    if policy.by_rows:
        padded = torch.stack([near, torch.cat([far, far.new_zeros(NEAR - FAR)])])
        with torch.no_grad():
            both, alone = (_of(policy, policy.hidden(near[:0], rows)) for rows in (padded, long[None]))
        return both[0, half:], None, alone[0, -half:], both[1, :FAR]
    positions = torch.cat([torch.arange(NEAR), _far_positions(last_position(model.config))[half:]])
    packed = _through(policy, torch.cat([near, far]), positions, Shared(half, 2))
    alone = _through(policy, long, torch.arange(len(long)), Causal())
    return packed[half:NEAR], packed[NEAR:], alone[-half:], None


def _through(policy: Any, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
    with torch.no_grad():
        return _of(policy, policy.flat(ids, positions, attend))


def _of(policy: Any, hidden: Tensor) -> Tensor:
    """Return log-probabilities over the vocabulary, on the host."""
    logits, cap = hidden @ policy.head_weight.T, policy.soft_cap
    return torch.log_softmax(cap * torch.tanh(logits / cap) if cap else logits, -1).cpu()


def _far_positions(last: int) -> Tensor:
    """Return a prefix at the first positions, then a row that ends at the model's last."""
    return torch.cat([torch.arange(NEAR // 2), torch.arange(max(NEAR // 2, last - FAR), last)[:FAR]])


def last_position(config: Any) -> int:
    """Return the maximum row length of a model."""
    return int(config.max_position_embeddings)


def _long(config: Any) -> int:
    """Return the length of the long row: beyond the configured windows, at most MOST."""
    spans = [getattr(config, name, None) for name in _SPANS]
    longest = max((s for s in spans if isinstance(s, int)), default=0)
    return max(NEAR, min(longest + NEAR, MOST, last_position(config)))


def _ids(vocab: int, long: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    near = torch.randint(0, vocab, (NEAR,), generator=generator)
    far = torch.randint(0, vocab, (FAR,), generator=generator)
    return near, far, torch.randint(0, vocab, (long,), generator=generator)


def difference(own: tuple[Tensor, ...], found: tuple[Tensor | None, ...], name: str, limit: float) -> str:
    """Return where and by how much a log-probability differs by more than `limit`, or empty."""
    where = ("", " at its last positions", " in a long row", " in a short row")
    for ours, theirs, place in zip(found, own, where, strict=True):
        worst = 0.0 if ours is None else float((ours - theirs).abs().max())
        if not worst <= limit:
            return (
                f"{name}: log-probabilities through insitu's attention and head differ by {worst:.3g} from"
                f" the model's own{place}, over the limit of {limit:g}: not an architecture insitu trains"
            )
    return ""
