"""Export a model or an adapter for transformers, vLLM and PEFT.

Whole tensors arrive as a stream, of which one is in memory at a time. What is at the folder is
always complete:

    <folder>.partial    written by rank 0, then renamed to <folder>
    <folder>.replaced   an older export, removed after that
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from spiral_mega.config import ModelConfig
from spiral_mega.distributed.row_gather import TensorSpec
from spiral_mega.models.peft_files import Adapter, write_peft
from spiral_mega.models.safetensors_files import MAX_FILE_BYTES, ShardedWriter
from spiral_mega.models.tensor_names import HEAD
from spiral_mega.models.weights import weight_shapes


def save_pretrained(
    weights: Iterable[tuple[str, torch.Tensor]],
    model: ModelConfig,
    folder: Path,
) -> None:
    """Stream `weights` into `folder` in the format of transformers, with config and tokenizer.

    Collective: every rank iterates, rank 0 writes. Tensors are saved in the dtype that the original
    config names. A tied head stays tied unless it has an adapter: then it is saved as a tensor of
    its own.
    """
    if dist.get_rank() == 0:
        partial = _start_export(folder)
        hf_config = AutoConfig.from_pretrained(model.path)
        head_adapted = model.lora is not None and "lm_head" in model.lora.targets
        hf_config.tie_word_embeddings = hf_config.tie_word_embeddings and not head_adapted
        _write_weights(weights, model.path, hf_config, partial)
        hf_config.save_pretrained(partial)
        AutoTokenizer.from_pretrained(model.tokenizer or model.path).save_pretrained(partial)
        with suppress(OSError):  # many models have no generation config
            GenerationConfig.from_pretrained(model.path).save_pretrained(partial)
        _finish_export(folder, partial)
    else:
        for _ in weights:
            pass
    dist.barrier()


def save_adapter(
    factors: Iterable[tuple[str, torch.Tensor]],
    model: ModelConfig,
    folder: Path,
) -> None:
    """Write an adapter's `factors`, given by PEFT's names, into `folder` in the format of PEFT.

    Collective.
    """
    is_main = dist.get_rank() == 0
    tensors = {name: tensor.cpu().clone() for name, tensor in factors if is_main}
    if is_main:
        assert model.lora is not None
        partial = _start_export(folder)
        adapter = Adapter.from_factors(tensors, model.lora.rank, float(model.lora.alpha), folder)
        write_peft(adapter, model.path, None, partial)
        _finish_export(folder, partial)
    dist.barrier()


def _write_weights(
    weights: Iterable[tuple[str, torch.Tensor]],
    path: str,
    hf_config: Any,
    partial: Path,
) -> None:
    tied = hf_config.tie_word_embeddings
    dtype = getattr(hf_config, "dtype", None) or torch.float32
    specs = {name: TensorSpec(shape, dtype) for name, shape in weight_shapes(path).items()}
    if tied:
        specs.pop(HEAD, None)
        weights = _drop_tied_head(weights)
    writer = ShardedWriter(partial, specs, MAX_FILE_BYTES)
    for name, tensor in weights:
        writer.add(name, tensor)
    writer.finish()


def _drop_tied_head(
    weights: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all weights but the head. Raises RuntimeError if it differs from the embedding."""
    embedding: torch.Tensor | None = None
    for name, tensor in weights:
        if name == HEAD:
            if embedding is None or not torch.equal(tensor.cpu(), embedding):
                raise RuntimeError("the head differs from the embedding that it is tied to")
            continue
        if name.endswith("embed_tokens.weight"):
            embedding = tensor.cpu().clone()
        yield name, tensor


def _start_export(folder: Path) -> Path:
    """Create an empty folder next to `folder`, to be renamed to it when it is complete."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def _finish_export(folder: Path, partial: Path) -> None:
    replaced = folder.with_name(folder.name + ".replaced")
    shutil.rmtree(replaced, ignore_errors=True)  # left by an export that was killed at this point
    if folder.exists():
        folder.rename(replaced)
    partial.rename(folder)
    shutil.rmtree(replaced, ignore_errors=True)
