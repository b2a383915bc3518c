"""Write a model in Hugging Face form from a stream of whole tensors, holding one file's worth in memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from spiral_mega.config import ModelConfig

MAX_FILE_BYTES = 4 * 2**30


def save_pretrained(weights: Iterable[tuple[str, torch.Tensor]], model: ModelConfig, folder: Path) -> None:
    """Stream `weights` (collective: every rank iterates, rank 0 writes) into `folder`, with config and tokenizer.

    Tensors are saved in the type that the original config names. A head equal to the embedding stays tied; one
    that training moved apart is saved untied. What stands at `folder` is always whole: an older
    export makes way by a rename.
    """
    writing = dist.get_rank() == 0
    hf_config = AutoConfig.from_pretrained(model.path)
    dtype = getattr(hf_config, "dtype", None) or torch.float32
    partial = folder.with_name(folder.name + ".partial")
    writer = _ShardWriter(partial, dtype) if writing else None
    embedding: torch.Tensor | None = None
    untied = not hf_config.tie_word_embeddings
    for name, tensor in weights:
        if writer is None:
            continue
        if hf_config.tie_word_embeddings and name.endswith("embed_tokens.weight"):
            embedding = tensor.cpu().clone()
        if hf_config.tie_word_embeddings and name == "lm_head.weight":
            if embedding is not None and torch.equal(tensor.cpu(), embedding):
                continue
            untied = True
        writer.add(name, tensor)
    if writer is not None:
        writer.finish()
        hf_config.tie_word_embeddings = not untied
        hf_config.save_pretrained(partial)
        AutoTokenizer.from_pretrained(model.tokenizer or model.path).save_pretrained(partial)
        with suppress(OSError):  # many a model has none
            GenerationConfig.from_pretrained(model.path).save_pretrained(partial)
        replaced = folder.with_name(folder.name + ".replaced")
        shutil.rmtree(replaced, ignore_errors=True)  # what an export that was killed here left
        if folder.exists():
            folder.rename(replaced)
        partial.rename(folder)
        shutil.rmtree(replaced, ignore_errors=True)
    dist.barrier()


class _ShardWriter:
    """safetensors files of bounded size and their index."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        self.folder, self.dtype = folder, dtype
        self.pending: dict[str, torch.Tensor] = {}
        self.pending_bytes = self.total_bytes = 0
        self.files: list[list[str]] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        tensor = tensor.to("cpu", self.dtype if tensor.is_floating_point() else tensor.dtype, copy=True).contiguous()
        if self.pending and self.pending_bytes + tensor.nbytes > MAX_FILE_BYTES:
            self._flush()
        self.pending[name] = tensor
        self.pending_bytes += tensor.nbytes

    def finish(self) -> None:
        """Write what is pending, give the files their final names, and the index if there are several."""
        self._flush()
        count = len(self.files)
        names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        if count == 1:
            names = ["model.safetensors"]
        for i, name in enumerate(names):
            (self.folder / f"part{i}").rename(self.folder / name)
        if count > 1:
            index = {
                "metadata": {"total_size": self.total_bytes},
                "weight_map": {key: names[i] for i, keys in enumerate(self.files) for key in keys},
            }
            (self.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))

    def _flush(self) -> None:
        save_file(self.pending, self.folder / f"part{len(self.files)}", metadata={"format": "pt"})
        self.files.append(list(self.pending))
        self.total_bytes += self.pending_bytes
        self.pending, self.pending_bytes = {}, 0
