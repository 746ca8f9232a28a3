"""A causal language model of transformers as a policy, with its attention and head replaced.

The attention function is registered with transformers' interface and runs the `Attend` of the current
forward; each layer's `forward` is wrapped per instance for precision and memory techniques (layers.py).
`open_hf` checks on random tokens that log-probabilities equal the model's own (parity.py). Where they do
not, the model keeps its own attention, masks and positions, and runs one row at a time (`by_rows`). The head
is insitu's in both cases, so an unknown head is refused.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from insitu.errors import TrainError
from insitu.install_hints import install_extra
from insitu_train.attention.rows import lay_flat
from insitu_train.embedded.architecture import ModelConfig
from insitu_train.embedded.model_files import StoredModel, model_files
from insitu_train.model.base import Attend, MemoryOptions
from insitu_train.model.experts import probe_replay, route
from insitu_train.model.layers import CURRENT, Mode, wrap_cast, wrap_embedding, wrap_layer
from insitu_train.model.lora import (
    adapter_tensors,
    add_lora,
    keep_in,
    merged,
    read_adapter,
    stored_adapter,
)
from insitu_train.model.offload import Offload
from insitu_train.model.parity import (
    bounds,
    check_architecture,
    difference,
    last_position,
    logprobs,
    mask_function,
    opened_config,
    own_logprobs,
    why_by_rows,
)
from insitu_train.options import Lora

WEIGHTS = "model.safetensors"
NAME = "insitu"
"""Name of the attention function in transformers' registry."""
_OWN = ("sdpa", "eager")
"""Attention of transformers itself, the economical one first."""
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

    def __init__(
        self, model: Any, *, dtype: torch.dtype, lora: Lora | None = None, device: torch.device | None = None
    ) -> None:
        """Wrap a `PreTrainedModel` with an output head, attention `NAME`, and its adapters.

        device: where it will be, if it is on the meta device.
        """
        self.model, self.lora = model, lora
        self.mode = Mode(dtype, Offload(device or model.device))
        self.around: Callable[[Callable[[], Tensor]], Tensor] = lambda run: run()
        """Runs a forward; sharded ranks (shard.py) gather weights around it."""
        self.rest: Callable[[], None] = lambda: None
        """Called after a forward without a backward: frees gathered weights."""
        self.shards = 1
        """Ranks that hold a part of every weight each."""
        self.whole: Mapping[str, Tensor] | None = None
        """Sharded: parameters and stored buffers, all or this rank's, while they are gathered to be read."""
        self.notices: list[str] = []
        """What a user should know about how this model trains."""
        # Llama 4 names a body that it does not have
        self._body: nn.Module = model.model if model.base_model is model else model.base_model
        self._embed: nn.Embedding = model.get_input_embeddings()
        self._head: nn.Linear = model.get_output_embeddings()
        # names of Cohere and Granite for a factor of the logits
        scale, divisor = (getattr(model.config, key, None) for key in ("logit_scale", "logits_scaling"))
        self._factor = float(scale or 1.0) / float(divisor or 1.0)
        self.layers = layers = decoder_layers(model)
        for index, layer in enumerate(layers):
            wrap_layer(layer, self.mode, index)
        self.routed = route(layers)
        """Numbers of layers and of experts, where a sampler's choice of experts can be replayed."""
        inside = {id(p) for layer in layers for p in layer.parameters()}
        for module in self._body.modules():
            own = list(module.parameters(recurse=False))
            if own and not any(id(p) in inside for p in own):
                (wrap_embedding if isinstance(module, nn.Embedding) else wrap_cast)(module, self.mode)

    @property
    def by_rows(self) -> bool:
        """Each row runs alone, through the model's own attention; `flat` and prefixes are not possible."""
        return bool(self.model.config._attn_implementation != NAME)

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
    def soft_cap(self) -> float:
        return float(getattr(self.model.config, "final_logit_softcapping", None) or 0.0)

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
        if self.by_rows:
            raise TrainError(f"{type(self.model).__name__} runs one row at a time")
        self.mode.attend = attend
        try:
            # without a mask, transformers looks for packed sequences in the positions
            seen = torch.ones(1, ids.shape[0], dtype=torch.bool, device=self.device)
            return self._run(ids[None], position_ids=positions.to(self.device)[None], attention_mask=seen)[0]
        finally:
            self.mode.attend = None

    def hidden(self, prefix: Tensor, rows: Tensor) -> Tensor:
        if self.by_rows and not prefix.shape[0]:
            return self._run(rows)
        ids, positions, attend = lay_flat(prefix, rows)
        return self.flat(ids, positions, attend)[prefix.shape[0] :].view(*rows.shape, -1)

    def _run(self, ids: Tensor, **given: Tensor) -> Tensor:
        """Return final hidden states [B, T, d] of ids [B, T]."""
        self.mode.offload.begin()

        def run() -> Tensor:
            found = self._body(input_ids=ids.to(self.device), use_cache=False, **given)
            out: Tensor = found.last_hidden_state
            return out if self._factor == 1.0 else out * self._factor

        return self.around(run)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.model.named_parameters()

    def readable(self) -> dict[str, Tensor]:
        """Return parameters whole, by name. Raises TrainError for sharded ones that are not gathered."""
        if self.whole is not None:
            return dict(self.whole)
        if self.shards > 1:
            raise TrainError("sharded weights must be gathered before they are read")
        return dict(self.named_parameters())

    @cached_property
    def config(self) -> ModelConfig:
        """Description for the embedded engine. Raises EngineError for another architecture."""
        return ModelConfig.of(self.model.config.to_dict())

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the weights that the embedded engine copies: adapters merged, on any device."""
        named = self.readable()
        return named if self.lora is None else merged(self.model, self.lora, named)

    def published(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that an engine must hold, by checkpoint name.

        They are all weights in the compute dtype, or the adapters.
        """
        from transformers.core_model_loading import revert_weight_conversion

        named = self.readable()
        if self.lora is not None:
            yield from adapter_tensors(named).items()
            return
        rounded = {name: tensor.detach().to(self.mode.dtype) for name, tensor in named.items()}
        # transformers fuses experts into one tensor, a checkpoint has one for each
        yield from revert_weight_conversion(self.model, rounded).items()

    def stored(self, *, whole: bool = False) -> StoredModel:
        if self.lora is not None and not whole:
            # without config.json, which transformers would take for a whole model
            return stored_adapter(self.readable(), self.lora, self.model.name_or_path)
        from transformers.core_model_loading import revert_weight_conversion
        from transformers.modeling_utils import remove_tied_weights_from_state_dict

        state = self._state()
        if self.lora is not None:
            state = merged(self.model, self.lora, state)
        # the steps of save_pretrained, which itself writes files only
        for ignored in self.model._keys_to_ignore_on_save or ():
            state.pop(ignored, None)
        state = remove_tied_weights_from_state_dict(state, self.model)
        tensors = revert_weight_conversion(self.model, state)
        return StoredModel(name=WEIGHTS, tensors=tensors, texts=self._configs())

    def _configs(self) -> dict[str, str]:
        """Return config.json and, for a model that generates, generation_config.json."""
        config = self.model.config
        config.dtype = str(self.model.dtype).removeprefix("torch.")
        config.architectures = [type(self.model).__name__.removeprefix("FSDP")]
        with _attention(self.model, "sdpa"), tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            if self.model.can_generate():
                self.model.generation_config.save_pretrained(folder)
            return {path.name: path.read_text(encoding="utf-8") for path in Path(folder).iterdir()}

    def _state(self) -> dict[str, Tensor]:
        """Return the model's `state_dict` with whole tensors, of sharded ranks those that are gathered."""
        kept = self.model.state_dict(keep_vars=True)
        named, names = self.readable(), {id(p): n for n, p in self.named_parameters()}
        named = named if self.whole is not None else {**kept, **named}
        held = {key: names.get(id(t), key) for key, t in kept.items()}
        return {key: named[name].detach() for key, name in held.items() if name in named}

    def read(self, folder: Path) -> Mapping[str, Tensor]:
        if self.lora is not None:
            held = read_adapter(self.lora, folder)
        else:
            with model_files(TrainError, f"load model {folder}"):
                held = dict(read_model(folder).named_parameters())
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
    rows: bool = False,
    replay: bool = False,
) -> HfPolicy:
    """Load the model of a folder: trained weights in fp32, computing in `dtype` on `device`.

    rows: run by rows even if insitu's attention would do. replay: its routers must take experts. Raises
    TrainError when it is not a causal language model, transformers is missing, or its log-probabilities
    through insitu's head differ from its own by more than `limit`.
    """
    with model_files(TrainError, f"load model {folder}"):
        model = read_model(folder)
    return adopt(model, device=device, dtype=dtype, lora=lora, limit=limit, rows=rows, replay=replay)


def adopt(
    model: Any,
    *,
    device: torch.device,
    dtype: torch.dtype,
    lora: Lora | None = None,
    limit: float = PROBE_LIMIT,
    rows: bool = False,
    replay: bool = False,
) -> HfPolicy:
    """Like `open_hf`, for a `PreTrainedModel` in fp32 with its own attention."""
    _register()
    check_architecture(model.config)
    # before the check: a forward of some billion fp32 weights takes a CPU minutes
    with _fits(model, device), _runs(model, "in transformers"):
        model.to(device)
        own = own_logprobs(model)
    model.requires_grad_(True)
    policy = HfPolicy(model.eval(), dtype=torch.float32, lora=lora)
    why = "" if rows else why_by_rows(model.config) or _fails(policy, NAME, own, limit)
    if rows or why:
        for attention in _OWN:
            if not (wrong := _fails(policy, attention, own, limit)):
                break
        else:
            raise TrainError(wrong)
        policy.notices += [f'{why}; each row runs alone (train.layout = "rows")'] if why else []
    if replay:
        probe_replay(policy)
    policy.mode.dtype = dtype
    if not replay and any(p.dim() == 3 and ".experts." in name for name, p in model.named_parameters()):
        policy.notices.append(
            f"{type(model).__name__} has experts; engine and trainer route each token by themselves: one near"
            " a tie may run through other experts here and get another log-probability:"
            " train.max_logprob_gap excludes it, and mismatch_kl shows how often;"
            " engine.replay_experts = true trains through the engine's choice"
        )
    if lora is not None:
        policy.lora = add_lora(model, decoder_layers(model), lora, dtype)
    return policy


def _fails(policy: HfPolicy, attention: str, own: tuple[Tensor, ...], limit: float) -> str:
    """Give the model this attention; return why its log-probabilities are not its `own`, or empty."""
    try:
        # raises where the model does not have it
        policy.model.set_attn_implementation(attention)
        with _runs(policy.model, "with insitu's attention" if attention == NAME else f"with {attention}"):
            found = logprobs(policy, policy.model)
    except (TrainError, ValueError) as error:
        return str(error)
    return difference(own, found, type(policy.model).__name__, limit)


@contextmanager
def _fits(model: Any, device: torch.device) -> Iterator[None]:
    """Turn a device without room for the whole model into one line."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        held = sum(p.numel() * 4 for p in model.parameters()) / (1 << 30)
        raise TrainError(
            f"{device} is full: opening {type(model).__name__} takes {held:.1f} GiB (float32) and a short"
            " pass; end what else uses it, or choose another GPU by CUDA_VISIBLE_DEVICES"
        ) from error


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


def read_config(folder: Path) -> Any:
    """Return the configuration of a model folder. Raises TrainError for one that insitu cannot train."""
    try:
        from transformers import AutoConfig
        from transformers.utils import logging

        _register()
    except ImportError as error:
        raise TrainError(f"policy.kind hf needs transformers: {install_extra('hf')}") from error
    logging.disable_progress_bar()
    with _causal(folder):
        config = opened_config(AutoConfig.from_pretrained(folder, local_files_only=True))
    check_architecture(config)
    return config


def read_model(folder: Path, short: Any = None) -> Any:
    """Return the model of a folder in fp32, with its own attention. Raises TrainError.

    short: a configuration with the first layers only; the others are not read.
    """
    read_config(folder)
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    level = logging.get_verbosity()
    if short is not None:
        logging.set_verbosity_error()  # the tensors of other layers are left over
    try:
        with _causal(folder):
            model: Any
            model, loaded = AutoModelForCausalLM.from_pretrained(
                folder,
                config=short,
                dtype=torch.float32,
                local_files_only=True,
                attn_implementation="eager",
                output_loading_info=True,
            )
    finally:
        logging.set_verbosity(level)
    if missing := sorted(loaded["missing_keys"]):
        # transformers would begin with random ones
        raise TrainError(
            f"{folder} lacks {len(missing)} tensors of {type(model).__name__}, first {missing[0]}: a file is"
            " incomplete, or config.json is another model's; download the folder again"
        )
    head = model.get_output_embeddings()
    if head is None or head.bias is not None:
        raise TrainError(f"{type(model).__name__} has no plain output head")
    return model


@contextmanager
def _causal(folder: Path) -> Iterator[None]:
    """Turn transformers' errors about a folder into one line."""
    try:
        yield
    except (ValueError, KeyError) as error:
        # the rest of the message lists some two hundred classes
        line = str(error).partition("Model type should be one of")[0].strip()
        raise TrainError(f"{folder} is not a causal language model of transformers: {line}") from error


def empty_model(config: Any, attention: str = "") -> Any:
    """Return the model of a configuration on torch's meta device, weights as fp32.

    attention: the one that `adopt` has chosen; empty = insitu's where the configuration allows it.
    """
    from transformers import AutoModelForCausalLM

    _register()
    with torch.device("meta"):
        build: Any = AutoModelForCausalLM.from_config
        attention = attention or (_OWN[0] if why_by_rows(config) else NAME)
        return build(config, dtype=torch.float32, attn_implementation=attention)


@contextmanager
def _attention(model: Any, name: str) -> Iterator[None]:
    """Set another attention name in the model's config meanwhile: ours must not be written to files."""
    before = model.config._attn_implementation
    model.config._attn_implementation = name
    try:
        yield
    finally:
        model.config._attn_implementation = before
