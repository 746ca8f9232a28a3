"""Tiny random models with a vocabulary of their own, as folders that become GGUF files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, decoders, models, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM

from insitu_train.gguf.pretokenizers import PRETOKENIZERS, WHOLE_WORDS
from insitu_train.gguf.write import write_gguf

TEMPLATE = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)
CONTROL, USER = ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), ("<tool_call>", "</tool_call>")
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192, "rope_theta": 500000.0,
}  # fmt: skip
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "llama with scaled RoPE": {"tie_word_embeddings": False, "rope_parameters": LLAMA3},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": False, "head_dim": 32},
}
TEXTS = [
    "def f(x):\n    return x * 2  # twice\n\nclass A:\n\tdef __init__(self):\n\t\tself.n = 0x1F + 1.5e-3\n",
    "It's what we'd call an 'ordinary' sentence, isn't it? They've said \"no\" -- 12345x (67%).\r\n\r\n  ",
    "Größe ÄÖÜ ß naïve Ελληνικά Русский 中文字符 日本語テキスト 한국어 עברית العربية हिन्दी ٣٤٥ ½ ² Ⅷ",
    "emoji 🙂🙃 👩‍💻 🇩🇪 e\u0301 \u200b zero\u00a0width  \t\t tabs   many    spaces\n \n  \n x",
    "2024-11-29T08:15:00Z 3.14159 1e10 007 1234567890123 a1b2c3 x2 2x IT'S I'LL 'S 're",
    "  leading, trailing  ",
    "!!!??? ...\n\n--- ### $$$ @@@ ```python\nprint('hi')\n```\n",
]


def model_folder(folder: Path, kind: str, pre: str = "qwen2", *, seed: int = 0) -> Path:
    """Write a random model of one of FAMILIES whose tokenizer cuts text as `pre` says."""
    folder.mkdir(parents=True)
    tokenizer = trained(pre)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": CONTROL[1], "eos_token": CONTROL[2], "pad_token": CONTROL[0]}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special})
    )
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    end = tokenizer.token_to_id(CONTROL[2])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, 0]}))
    shape = {
        "vocab_size": 2048, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5, "initializer_range": 0.3, "eos_token_id": end,
    }  # fmt: skip
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind.split()[0], **{**shape, **FAMILIES[kind]})
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
    generation = (folder / "generation_config.json").read_text()
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(generation)
    return folder


def trained(pre: str) -> Tokenizer:
    """A vocabulary trained on TEXTS and insitu's own text, its pieces cut as `pre` says."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre in WHOLE_WORDS))
    tokenizer.pre_tokenizer, tokenizer.decoder = PRETOKENIZERS[pre], decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1900,
        special_tokens=list(CONTROL),
        initial_alphabet=PRETOKENIZERS["gpt-2"].alphabet(),
        show_progress=False,
    )
    corpus = [path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))[:12]]
    tokenizer.train_from_iterator([*corpus, *TEXTS * 4], trainer)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in USER])
    if pre == "llama-bpe":
        bos = CONTROL[1]
        number = tokenizer.token_to_id(bos)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, number)]
        )
    return tokenizer


def gguf_of(folder: Path, file: Path, dtype: str = "float32") -> Path:
    """Write a model folder's GGUF file."""
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())

    def values_of(name: str) -> Any:
        return tensors[name].float().numpy()

    write_gguf(file, folder, config, tensors, values_of, dtype=dtype)
    return file


def logits(folder: Path, ids: np.ndarray[Any, Any]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        found: torch.Tensor = model(torch.from_numpy(ids)[None]).logits[0]
    return found
