"""Write a model in Hugging Face form from a stream of whole tensors, holding one of them in memory."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from spiral_mega.config import ModelConfig
from spiral_mega.conversion.peft_adapters import Adapter, pair, write_peft
from spiral_mega.models.safetensors_files import MAX_FILE_BYTES, Form, ShardedWriter
from spiral_mega.models.weights import weight_shapes


def save_pretrained(weights: Iterable[tuple[str, torch.Tensor]], model: ModelConfig, folder: Path) -> None:
    """Stream `weights` (collective: every rank iterates, rank 0 writes) into `folder`, with config and tokenizer.

    Tensors are saved in the type that the original config names. A tied head stays tied, unless it has an adapter: then
    it is saved as a tensor of its own. What stands at `folder` is always whole: an older export makes way by a rename.
    """
    hf_config = AutoConfig.from_pretrained(model.path)
    dtype = getattr(hf_config, "dtype", None) or torch.float32
    adapted = model.lora is not None and "lm_head" in model.lora.targets
    tied = hf_config.tie_word_embeddings and not adapted
    writer = None
    if dist.get_rank() == 0:
        partial = _begin(folder)
        shapes = weight_shapes(model.path)
        kept = {name: Form(shape, dtype) for name, shape in shapes.items() if not (tied and name == "lm_head.weight")}
        writer = ShardedWriter(partial, kept, MAX_FILE_BYTES)
    embedding: torch.Tensor | None = None
    for name, tensor in weights:
        if writer is None:
            continue
        if tied and name.endswith("embed_tokens.weight"):
            embedding = tensor.cpu().clone()
        if tied and name == "lm_head.weight":
            if embedding is None or not torch.equal(tensor.cpu(), embedding):
                raise RuntimeError("the head differs from the embedding that it is tied to")
            continue
        writer.add(name, tensor)
    if writer is not None:
        writer.finish()
        hf_config.tie_word_embeddings = tied
        hf_config.save_pretrained(partial)
        AutoTokenizer.from_pretrained(model.tokenizer or model.path).save_pretrained(partial)
        with suppress(OSError):  # many a model has none
            GenerationConfig.from_pretrained(model.path).save_pretrained(partial)
        _replace(folder, partial)
    dist.barrier()


def save_adapter(factors: Iterable[tuple[str, torch.Tensor]], model: ModelConfig, folder: Path) -> None:
    """Write an adapter's `factors`, by PEFT's names, as PEFT does, whole as above; collective."""
    main = dist.get_rank() == 0
    tensors = {name: tensor.cpu().clone() for name, tensor in factors if main}
    if main:
        assert model.lora is not None
        rank, alpha = model.lora.rank, float(model.lora.alpha)
        partial = _begin(folder)
        adapter = Adapter(pair(tensors, ".weight", alpha / rank, rank, folder), rank, alpha)
        write_peft(adapter, model.path, None, partial)
        _replace(folder, partial)
    dist.barrier()


def _begin(folder: Path) -> Path:
    """An empty folder beside `folder`, for what is to take its place."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def _replace(folder: Path, partial: Path) -> None:
    replaced = folder.with_name(folder.name + ".replaced")
    shutil.rmtree(replaced, ignore_errors=True)  # what an export that was killed here left
    if folder.exists():
        folder.rename(replaced)
    partial.rename(folder)
    shutil.rmtree(replaced, ignore_errors=True)
