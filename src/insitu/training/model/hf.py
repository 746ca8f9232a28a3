"""A causal language model of transformers as a policy, with its attention and head replaced.

The attention function is registered with transformers' interface and runs the `Attend` of the current
forward; each layer's `forward` is wrapped per instance for precision and memory techniques (layers.py).
`open_hf` checks on random tokens that log-probabilities equal the model's own (parity.py), so an unknown head
or attention is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from insitu.engines.embedded.model_files import model_files
from insitu.errors import TrainError
from insitu.install_hints import install_extra
from insitu.training.attention.rows import lay_flat
from insitu.training.model.base import Attend, MemoryOptions
from insitu.training.model.layers import CURRENT, Mode, wrap_cast, wrap_layer
from insitu.training.model.lora import adapter_tensors, add_lora, keep_in, merged, read_adapter, save_adapter
from insitu.training.model.offload import Offload
from insitu.training.model.parity import (
    bounds,
    check_architecture,
    last_position,
    logprobs,
    mask_function,
    own_logprobs,
    prove,
)
from insitu.training.options import Lora

NAME = "insitu"
"""Name of the attention function in transformers' registry."""
_UNKNOWN = ("sliding_window", "softcap", "s_aux", "head_mask")
"""Arguments of an attention function that would change its result; none is supported."""
PROBE_LIMIT = 1e-3
"""Largest difference of a log-probability in the parity check."""
_BREAKS = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""Exceptions of a model that does not run on given embeddings and attention."""


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: object,
) -> tuple[Tensor, None]:
    """Attend with `CURRENT.attend`: query [1, heads, U, hd], ... -> ([1, U, heads, hd], no weights)."""
    wrong = [name for name in _UNKNOWN if options.get(name) is not None]
    if value.shape[-1] != query.shape[-1]:
        wrong.append(f"values of width {value.shape[-1]} with keys of width {query.shape[-1]}")
    if attention_mask is not None:
        wrong.append(f"an attention mask that is not plain causal{bounds(getattr(module, 'config', None))}")
    if wrong or dropout:
        raise TrainError(f"{type(module).__name__} needs {', '.join(wrong) or 'dropout'}: not supported")
    if CURRENT.attend is None:
        raise TrainError("the attention function ran outside a forward of its policy")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = CURRENT.attend(query[0], key[0], value[0], scale)
    return out.transpose(0, 1)[None], None


class HfPolicy:
    """A causal language model of transformers (`training.model.base.Policy`); use `open_hf`."""

    def __init__(self, model: Any, *, dtype: torch.dtype, lora: Lora | None = None) -> None:
        """Wrap a `PreTrainedModel` with an output head, attention `NAME`, and its adapters."""
        self.model, self.lora = model, lora
        self.mode = Mode(dtype, Offload(model.device))
        self.around: Callable[[Callable[[], Tensor]], Tensor] = lambda run: run()
        """Runs a forward; sharded ranks (shard.py) gather weights around it."""
        self.rest: Callable[[], None] = lambda: None
        """Called after a forward without a backward: frees gathered weights."""
        self.shards = 1
        """Ranks that hold a part of every weight each."""
        self.whole: Mapping[str, Tensor] | None = None
        """Sharded: all parameters, while they are gathered to be read."""
        self._body: nn.Module = model.base_model
        self._embed: nn.Embedding = model.get_input_embeddings()
        self._head: nn.Linear = model.get_output_embeddings()
        layers = decoder_layers(model)
        for layer in layers:
            wrap_layer(layer, self.mode)
        inside = {id(p) for layer in layers for p in layer.parameters()}
        for module in self._body.modules():
            own = list(module.parameters(recurse=False))
            if own and not any(id(p) in inside for p in own) and module is not self._embed:
                wrap_cast(module, self.mode)

    @property
    def max_positions(self) -> int:
        return last_position(self.model.config)

    @property
    def vocab_size(self) -> int:
        return int(self._head.weight.shape[0])

    @property
    def head_weight(self) -> Tensor:
        return self._head.weight

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.mode.dtype

    @property
    def device(self) -> torch.device:
        return self._embed.weight.device

    @property
    def head_dim(self) -> int:
        config = self.model.config
        return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)

    @property
    def techniques(self) -> MemoryOptions:
        """Memory options of the next forward and backward."""
        return self.mode.techniques

    @techniques.setter
    def techniques(self, chosen: MemoryOptions) -> None:
        self.mode.techniques = chosen

    def freeze(self) -> None:
        """Freeze all weights and keep them in the compute dtype, which gives the same bits."""
        self.model.requires_grad_(False)
        keep_in(self.model, self.mode.dtype)

    def flat(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return final hidden states [U, d] of a flat list of tokens; ids and positions [U] int64."""
        self.mode.attend = attend
        self.mode.offload.begin()

        def run() -> Tensor:
            x = F.embedding(ids.to(self.device), self._embed.weight).to(self.mode.dtype)
            found = self._body(
                inputs_embeds=x[None],
                position_ids=positions.to(self.device)[None],
                # without a mask, transformers looks for packed sequences in the positions
                attention_mask=torch.ones(1, ids.shape[0], dtype=torch.bool, device=x.device),
                use_cache=False,
            )
            out: Tensor = found.last_hidden_state[0]
            return out

        try:
            return self.around(run)
        finally:
            self.mode.attend = None

    def hidden(self, prefix: Tensor, rows: Tensor) -> Tensor:
        ids, positions, attend = lay_flat(prefix, rows)
        return self.flat(ids, positions, attend)[prefix.shape[0] :].view(*rows.shape, -1)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.model.named_parameters()

    def readable(self) -> dict[str, Tensor]:
        """Return every parameter whole, by name. Raises TrainError for sharded ones that are not gathered."""
        if self.whole is not None:
            return dict(self.whole)
        if self.shards > 1:
            raise TrainError("sharded weights must be gathered before they are read")
        return dict(self.named_parameters())

    def published(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what an engine must hold, by checkpoint name: all weights in the compute dtype, or the
        adapters.
        """
        from transformers.core_model_loading import revert_weight_conversion

        named = self.readable()
        if self.lora is not None:
            yield from adapter_tensors(named).items()
            return
        rounded = {name: tensor.detach().to(self.mode.dtype) for name, tensor in named.items()}
        # transformers fuses experts into one tensor, a checkpoint has one for each
        yield from revert_weight_conversion(self.model, rounded).items()

    def save(self, folder: Path) -> None:
        if self.lora is not None:
            # without config.json, which transformers would take for a whole model
            save_adapter(self.readable(), self.lora, self.model.name_or_path, folder)
            return
        with model_files(TrainError, f"save model {folder}"), _attention(self.model, "sdpa"):
            whole = self._state() if self.shards > 1 else None
            self.model.save_pretrained(folder, max_shard_size="1TB", state_dict=whole)

    def save_whole(self, folder: Path) -> None:
        if self.lora is None:
            self.save(folder)
            return
        with model_files(TrainError, f"save model {folder}"), _attention(self.model, "sdpa"):
            tensors = merged(self.model, self.lora, self._state())
            self.model.save_pretrained(folder, max_shard_size="1TB", state_dict=tensors)

    def _state(self) -> dict[str, Tensor]:
        """Return the model's `state_dict` with whole tensors."""
        kept = self.model.state_dict(keep_vars=True)
        named, names = self.readable(), {id(p): n for n, p in self.named_parameters()}
        return {key: (named[names[id(t)]] if id(t) in names else t).detach() for key, t in kept.items()}

    def read(self, folder: Path) -> Mapping[str, Tensor]:
        if self.lora is not None:
            held = read_adapter(self.lora, folder)
        else:
            with model_files(TrainError, f"load model {folder}"):
                held = dict(_read(folder, torch.float32).named_parameters())
        trained = {n: p.shape for n, p in self.named_parameters() if p.requires_grad}
        if {n: p.shape for n, p in held.items()} != trained:
            raise TrainError(f"{folder} holds a different model from the one being trained")
        return held


def decoder_layers(model: Any) -> list[nn.Module]:
    """Return the decoder layers in order. Raises TrainError when the model does not mark them."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers: list[nn.Module] = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        raise TrainError(f"{type(model).__name__} has no layers that insitu can wrap")
    return layers


def open_hf(
    folder: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    lora: Lora | None = None,
    limit: float = PROBE_LIMIT,
) -> HfPolicy:
    """Load the model of a folder: trained weights in fp32, computing in `dtype` on `device`.

    Raises TrainError when it is not a causal language model, transformers is missing, or its
    log-probabilities through insitu's attention and head differ from its own by more than `limit`.
    """
    with model_files(TrainError, f"load model {folder}"):
        model = _read(folder, torch.float32)
    return adopt(model, device=device, dtype=dtype, lora=lora, limit=limit)


def adopt(
    model: Any,
    *,
    device: torch.device,
    dtype: torch.dtype,
    lora: Lora | None = None,
    limit: float = PROBE_LIMIT,
) -> HfPolicy:
    """Like `open_hf`, for a `PreTrainedModel` in fp32 with its own attention."""
    _register()
    check_architecture(model.config)
    # before the check: a forward of some billion fp32 weights takes a CPU minutes
    model.to(device)
    with _runs(model, "in transformers"):
        own = own_logprobs(model)
    model.set_attn_implementation(NAME)
    model.requires_grad_(True)
    policy = HfPolicy(model.train(), dtype=torch.float32, lora=lora)
    with _runs(model, "with insitu's embeddings and attention"):
        found = logprobs(policy, model)
    prove(own, found, type(model).__name__, limit)
    policy.mode.dtype = dtype
    if lora is not None:
        policy.lora = add_lora(model, decoder_layers(model), lora, dtype)
    return policy


@contextmanager
def _runs(model: Any, how: str) -> Iterator[None]:
    """Turn exceptions of an architecture's code into one line."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except _BREAKS as error:
        line = str(error).strip().partition("\n")[0][:200]
        raise TrainError(
            f"{type(model).__name__} does not run {how} ({type(error).__name__}: {line}): not an architecture"
            " insitu trains"
        ) from error


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention_function)
    AttentionMaskInterface.register(NAME, mask_function)


def _read(folder: Path, dtype: torch.dtype) -> Any:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.utils import logging

        _register()
    except ImportError as error:
        raise TrainError(f"policy.kind hf needs transformers: {install_extra('hf')}") from error
    logging.disable_progress_bar()
    try:
        check_architecture(AutoConfig.from_pretrained(folder, local_files_only=True))
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, attn_implementation="eager"
        )
    except (ValueError, KeyError) as error:
        # the rest of the message lists some two hundred classes
        line = str(error).partition("Model type should be one of")[0].strip()
        raise TrainError(f"{folder} is not a causal language model of transformers: {line}") from error
    head = model.get_output_embeddings()
    if head is None or head.bias is not None:
        raise TrainError(f"{type(model).__name__} has no plain output head")
    if type(model.get_input_embeddings()) is not nn.Embedding:
        kind = type(model.get_input_embeddings()).__name__
        raise TrainError(
            f"{type(model).__name__} has embeddings that are not a plain table ({kind}): not supported"
        )
    return model


def empty_model(config: Any) -> Any:
    """Return the model of a configuration on torch's meta device, weights as fp32."""
    from transformers import AutoModelForCausalLM

    _register()
    with torch.device("meta"):
        build: Any = AutoModelForCausalLM.from_config
        return build(config, dtype=torch.float32, attn_implementation=NAME)


@contextmanager
def _attention(model: Any, name: str) -> Iterator[None]:
    """Set another attention name in the model's config meanwhile: ours must not be written to files."""
    model.config._attn_implementation = name
    try:
        yield
    finally:
        model.config._attn_implementation = NAME
