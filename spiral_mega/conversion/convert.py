"""Convert a model from one format to another; the target is complete or not created at all."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spiral_mega.conversion import dcp, torch_dist
from spiral_mega.conversion.open_model import (
    OpenedModel,
    check_family,
    expected_tensors,
    open_model,
)
from spiral_mega.conversion.sources import MergedSource, Source, digest
from spiral_mega.conversion.verify import verify_logits
from spiral_mega.distributed.row_gather import TensorSpec
from spiral_mega.errors import UserError
from spiral_mega.models.peft_files import write_peft
from spiral_mega.models.safetensors_files import ShardedWriter
from spiral_mega.models.tensor_names import EMBEDDING, HEAD, expert_slices

FORMATS = ("hf", "dcp", "dcp-megatron", "torch_dist", "peft")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MANIFEST = "SHA256SUMS"
# Weights in any format, and files that describe the origin's files. Everything else is copied.
WEIGHTS = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin",
    "*.bin.index.json",
    "*.pt",
    "*.pth",
    "*.distcp",
)
NOT_COPIED = (
    *WEIGHTS,
    "*.gguf",
    ".*",
    "meta.json",
    "manifest.json",
    "adapter_config.json",
    torch_dist.CONFIG,
    torch_dist.COMMON,
    MANIFEST,
)


def convert(
    origin: Path,
    target: Path,
    to: str,
    *,
    base: str | None = None,
    model: str | None = None,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = 4 * 2**30,
    verify: bool = False,
) -> list[str]:
    """Write the model at `origin` to `target` in the format `to`, and return what was done, line by
    line.

    `origin`: a Hugging Face folder, a checkpoint (step_NNNNNN, or megatron-core's) or a PEFT
    adapter; the last two need a `base`, unless they name one. `model`: which model of a checkpoint
    of two. To "hf" adapters are merged. `dtype`: of floating-point tensors; None keeps each
    tensor's own (for a merge, its base's). `verify` compares the logits of both ends afterwards.
    Raises UserError, and leaves nothing at `target`, if origin, base and formats do not fit
    together.
    """
    opened = open_model(origin, base, model)
    if opened.adapter is None and to == "peft":
        raise UserError(f"{origin} holds whole weights and no adapter: convert it to hf or dcp")
    if opened.adapter is not None and to not in ("hf", "peft"):
        raise UserError(
            f"{origin} is an adapter: convert it to peft, or to hf, which merges it into its base"
        )
    with _complete_folder(target) as partial:
        if to == "peft":
            assert opened.adapter is not None
            write_peft(opened.adapter, opened.base_name, dtype, partial)
        else:
            _write_weights(opened, to, dtype, max_file_bytes, partial)
        _copy_other_files(opened, partial, config=to != "peft")
        count = _write_manifest(partial)
        size = sum(file.stat().st_size for file in partial.iterdir())
        done = [*opened.notes, f"{target}: {count} files, {size / 1e9:.3f} GB, {MANIFEST}"]
        if verify:
            done.append(verify_logits(opened, partial, to))
    return done


@dataclass(frozen=True, slots=True)
class _Weights:
    """The tensors to write: `specs` of all of them, values in `source`.

    A tied head is not among them.
    """

    source: Source
    specs: dict[str, TensorSpec]
    tied: bool
    hf_config: Any


def _write_weights(
    model: OpenedModel,
    to: str,
    dtype: torch.dtype | None,
    max_file_bytes: int,
    folder: Path,
) -> None:
    weights = _weights_to_write(model, dtype)
    if to == "dcp":
        _write_fsdp_checkpoint(weights, folder)
    elif to in ("dcp-megatron", "torch_dist"):
        check_family(weights.hf_config, model.folder)
        if to == "dcp-megatron":
            dcp.write_dcp(weights.source, weights.specs, folder, dcp.MEGATRON_PREFIX)
        else:
            torch_dist.write_megatron(
                weights.source, weights.specs, weights.hf_config, tied=weights.tied, folder=folder
            )
    else:
        _write_safetensors(weights, max_file_bytes, folder)
    _write_config(model.folder, weights, folder)


def _weights_to_write(model: OpenedModel, dtype: torch.dtype | None) -> _Weights:
    expected = expected_tensors(model.folder)
    source, tied = _merge_adapter(model, expected.tied)
    specs = {}
    for name, spec in source.specs.items():
        if tied and name == HEAD:
            continue
        rounded = dtype if dtype is not None and spec.dtype.is_floating_point else spec.dtype
        specs[name] = TensorSpec(spec.shape, rounded)
    return _Weights(source, specs, tied, expected.config)


def _merge_adapter(model: OpenedModel, tied: bool) -> tuple[Source, bool]:
    """Return the final values of the weights, and whether the head is still tied to the embedding."""
    source = model.source
    if model.adapter is None:
        if tied and HEAD in source.specs:
            tied = digest(source, HEAD) == digest(source, EMBEDDING)
        return source, tied
    updates = model.adapter.updates
    untied_head = {HEAD: EMBEDDING} if tied and HEAD in updates else {}
    return MergedSource(source, updates, untied_head), tied and not untied_head


def _write_safetensors(weights: _Weights, max_file_bytes: int, folder: Path) -> None:
    writer = ShardedWriter(folder, weights.specs, max_file_bytes)
    for name in weights.specs:
        for rows in weights.source.blocks(name):
            writer.add_rows(name, rows.start if rows else 0, weights.source.read(name, rows))
    writer.finish()


def _write_fsdp_checkpoint(weights: _Weights, folder: Path) -> None:
    """Write as the trainer does on FSDP2: a tied head is listed, experts are fused as transformers trains them."""
    tied_names = {HEAD: EMBEDDING} if weights.tied else {}
    specs = weights.specs | {
        head: weights.specs[embedding] for head, embedding in tied_names.items()
    }
    shapes = {name: spec.shape for name, spec in weights.specs.items()}
    experts = expert_slices(weights.hf_config.model_type, shapes)
    dcp.write_dcp(weights.source, specs, folder, dcp.FSDP_PREFIX, tied_names, experts)


def _write_config(origin: Path, weights: _Weights, folder: Path) -> None:
    """Copy config.json, with the dtype of the written weights, and whether their head is tied."""
    config = json.loads((origin / "config.json").read_text())
    _set_dtype(
        config, {spec.dtype for spec in weights.specs.values() if spec.dtype.is_floating_point}
    )
    if weights.tied != bool(weights.hf_config.get_text_config().tie_word_embeddings):
        config["tie_word_embeddings"] = weights.tied
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _set_dtype(config: dict[str, Any], dtypes: set[torch.dtype]) -> None:
    """Set the weights' dtype in a config, wherever it names one.

    Leave it unchanged if dtypes are mixed.
    """
    if len(dtypes) != 1:
        return
    (dtype,) = dtypes
    for key, value in config.items():
        if key in ("dtype", "torch_dtype") and value is not None:
            config[key] = str(dtype).removeprefix("torch.")
        elif isinstance(value, dict) and key.endswith("_config"):
            _set_dtype(value, dtypes)


def _copy_other_files(model: OpenedModel, folder: Path, *, config: bool) -> None:
    """Copy what is no weight and not there yet: tokenizer, chat template, generation config,
    licence, code.

    Without `config`, the model's config and generation config are left out.
    """
    not_copied = NOT_COPIED if config else (*NOT_COPIED, "config.json", "generation_config.json")
    for origin in (model.tokenizer, model.folder):
        if origin is None:
            continue
        for file in sorted(origin.iterdir()):
            copied = file.is_file() and not any(file.match(pattern) for pattern in not_copied)
            if copied and not (folder / file.name).exists():
                shutil.copyfile(file, folder / file.name)


def _write_manifest(folder: Path) -> int:
    """List all files with their SHA-256, as sha256sum does, and return how many there are."""
    lines = []
    for file in sorted(folder.iterdir()):
        with file.open("rb") as content:
            lines.append(f"{hashlib.file_digest(content, 'sha256').hexdigest()}  {file.name}\n")
    (folder / MANIFEST).write_text("".join(lines))
    return len(lines)


@contextmanager
def _complete_folder(target: Path) -> Iterator[Path]:
    """Yield a folder to write to, which is renamed to `target` on success and removed on an error."""
    if target.exists():
        raise UserError(f"{target} exists already: remove it, or name another target")
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.rename(target)
    except OSError as error:
        raise UserError(f"{target} cannot be written ({error}): check space and rights") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
