"""A checkpoint as a model for other programs: a folder with whole weights, PEFT's adapters, a GGUF file.

Run as `python -m insitu_train.model_export --run DIR --checkpoint DIR --folder DIR --to FORM --dtype TYPE
--base NAME`; prints the type of the weights.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file

from insitu.config import Config, model_folder
from insitu.engines.safetensors_file import model_assets
from insitu.errors import RecordError, TrainError
from insitu.storage.run_dir import read_config
from insitu_train.channel.parent_watch import child_parser, main_of_child
from insitu_train.checkpoint_files import verify
from insitu_train.embedded.model_files import StoredModel, model_files, read_tensors, write_summed
from insitu_train.gguf.write import write_gguf
from insitu_train.model.load import open_policy, start_dtype
from insitu_train.model.lora import CONFIG, WEIGHTS
from insitu_train.options import PolicyConfig

WHOLE, GGUF = "model.safetensors", "model.gguf"


def _write_model(
    checkpoint: Path,
    folder: Path,
    config: Config,
    to: Literal["hf", "peft", "gguf"],
    *,
    dtype: str,
    base: str,
) -> str:
    """Write the new `folder`; return its dtype.

    dtype: float32, bfloat16, of GGUF also q8_0, or auto = that of the start model, of adapters their own.
    base: name of the start model in the configuration of adapters. Raises InsituError.
    """
    verify(checkpoint)
    with model_files(TrainError, f"export {checkpoint}"):
        adapted = (checkpoint / WEIGHTS).exists()
        if to == "peft" and not adapted:
            raise RecordError(f"{checkpoint} has no adapters (policy.lora_rank = 0): use --to hf")
        if dtype == "auto":
            dtype = (
                "float32" if to == "peft" else start_dtype(model_folder(config) if adapted else checkpoint)
            )
        made = _adapters(checkpoint, base) if to == "peft" else _whole(checkpoint, config, dtype, adapted)
        folder.mkdir(parents=True)
        if to == "gguf":
            _write_gguf(made, checkpoint, folder / GGUF, dtype)
            return dtype
        for path in model_assets(checkpoint):
            shutil.copyfile(path, folder / path.name)
        for name, text in made.texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        write_summed(folder / made.name, made.tensors, getattr(torch, dtype))
    return dtype


def _write_gguf(made: StoredModel, checkpoint: Path, file: Path, dtype: str) -> None:
    tensors, config = made.tensors, json.loads(made.texts["config.json"])
    write_gguf(file, checkpoint, config, tensors, lambda name: tensors[name].float().numpy(), dtype=dtype)


def _adapters(checkpoint: Path, base: str) -> StoredModel:
    described = json.loads((checkpoint / CONFIG).read_text()) | {"base_model_name_or_path": base}
    texts = {CONFIG: json.dumps(described, indent=2, sort_keys=True) + "\n"}
    return StoredModel(name=WEIGHTS, tensors=load_file(checkpoint / WEIGHTS), texts=texts)


def _whole(checkpoint: Path, config: Config, dtype: str, adapted: bool) -> StoredModel:
    if adapted:
        policy = open_policy(model_folder(config), PolicyConfig.of(config).changed(device="cpu"))
        held, named = policy.read(checkpoint), dict(policy.named_parameters())
        with torch.no_grad():
            for name, tensor in held.items():
                named[name].copy_(tensor)
        made = policy.stored(whole=True)
    else:
        texts = {p.name: p.read_text() for p in checkpoint.glob("*config.json")}
        made = StoredModel(name=WHOLE, tensors=read_tensors(checkpoint), texts=texts)
    described = json.loads(made.texts["config.json"]) | {"torch_dtype": dtype, "dtype": dtype}
    described.pop("_name_or_path", None)  # a path of this machine
    texts = {**made.texts, "config.json": json.dumps(described, indent=2, sort_keys=True) + "\n"}
    return StoredModel(name=made.name, tensors=made.tensors, texts=texts)


def run(args: argparse.Namespace) -> None:
    config = read_config(args.run)
    print(_write_model(args.checkpoint, args.folder, config, args.to, dtype=args.dtype, base=args.base))


def main(argv: list[str]) -> int:
    """Return 0, or 1 with one line on standard error."""
    module = "insitu_train.model_export"
    parser = child_parser(
        module, __doc__, run=Path, checkpoint=Path, folder=Path, to=str, dtype=str, base=str
    )
    return main_of_child(parser, run, argv)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
