"""Open what is to be converted: recognize its format, find its base, check that both match.

These files tell the format, in this order:

    metadata.json and common.pt   megatron-core's checkpoint, with the config of --base
    .metadata (step_NNNNNN)       the trainer's checkpoint: weights, or adapter on meta.json's base
    adapter_config.json           PEFT adapter, on the base that it names
    config.json                   Hugging Face folder
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import snapshot_download

from spiral_mega.conversion import dcp, torch_dist
from spiral_mega.conversion.checks import check_adapter, check_tensors
from spiral_mega.conversion.sources import SafetensorsSource, Source, read_whole
from spiral_mega.errors import UserError
from spiral_mega.models import peft_files
from spiral_mega.models.peft_files import Adapter
from spiral_mega.models.tensor_names import HEAD, expert_slices, to_checkpoint_names
from spiral_mega.models.weights import meta_model
from spiral_mega.policy.lora import DEFAULT_ADAPTER
from spiral_mega.policy.megatron.families import FAMILIES
from spiral_mega.traces import AGGREGATION


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """What is converted: the whole weights in `source` or, with `adapter`, a low-rank update of
    them.

    `folder` holds the config and the files that are copied along; `tokenizer` is set if it comes
    from elsewhere.
    """

    source: Source
    folder: Path
    adapter: Adapter | None = None
    tokenizer: Path | None = None
    base_name: str = ""
    notes: tuple[str, ...] = ()  # about how it was read, for the user


class ExpectedTensors(NamedTuple):
    """What a model's config asks for: `shapes` of the weights in its files, and whether the head is tied."""

    shapes: dict[str, torch.Size]
    tied: bool
    config: Any


def open_model(origin: Path, base: str | None, which: str | None) -> OpenedModel:
    """Open the model or adapter at `origin`, with the model `base` instead of the one that it
    names.

    `which`: the model to take from a checkpoint of two. Raises UserError if there is nothing that
    can be read, or if tensors do not match the config.
    """
    is_checkpoint = (origin / dcp.METADATA).exists()
    is_megatron = torch_dist.is_megatron(origin)
    if which is not None and (is_megatron or not is_checkpoint):
        raise UserError(
            f"--model is {which}, but {origin} is no checkpoint of two models: leave it out"
        )
    if is_megatron:
        return _open_megatron(origin, base)
    if is_checkpoint:
        return _open_checkpoint(origin, base, which)
    if (origin / peft_files.CONFIG).exists():
        return _open_peft(origin, base)
    if (origin / "config.json").exists():
        return OpenedModel(_open_safetensors(origin, expected_tensors(origin)), origin)
    newest = max(
        (path.parent for path in origin.glob("checkpoints/step_*/.metadata")), default=None
    )
    hint = f"; it is a run, so name a checkpoint, such as {newest}" if newest else ""
    raise UserError(
        f"{origin} is neither a model (config.json), a checkpoint (.metadata) nor adapter "
        f"(adapter_config.json){hint}"
    )


def expected_tensors(folder: Path) -> ExpectedTensors:
    """Read the config in `folder`.

    Raises UserError if it is not that of a causal language model.
    """
    try:
        model = meta_model(str(folder))
    except Exception as error:  # a malformed config fails in many ways
        raise UserError(
            f"{folder / 'config.json'} is not that of a causal language model: {error}"
        ) from error
    config = model.config
    weights = to_checkpoint_names(config.model_type, model.named_parameters(remove_duplicate=False))
    shapes = {name: weight.shape for name, weight in weights}
    saved = model.state_dict()
    shapes |= {name: buffer.shape for name, buffer in model.named_buffers() if name in saved}
    return ExpectedTensors(shapes, bool(config.get_text_config().tie_word_embeddings), config)


def check_family(config: Any, folder: Path) -> None:
    """Raise UserError unless models of this config can be converted to and from megatron-core."""
    if config.model_type not in FAMILIES:
        raise UserError(
            f"{folder} is a model of type {config.model_type!r}, which is not converted to or from "
            f"megatron-core: {', '.join(FAMILIES)} are"
        )


def _open_safetensors(folder: Path, expected: ExpectedTensors) -> SafetensorsSource:
    source = SafetensorsSource(folder)
    check_tensors(source.specs, expected.shapes, {HEAD} if expected.tied else set(), folder, folder)
    return source


def _open_peft(origin: Path, base: str | None) -> OpenedModel:
    adapter = peft_files.read_peft(origin)
    name = base or json.loads((origin / peft_files.CONFIG).read_text()).get(
        "base_model_name_or_path"
    )
    own_tokenizer = origin if list(origin.glob("tokenizer*")) else None
    return _with_base(adapter, name, origin, own_tokenizer)


def _open_megatron(origin: Path, base: str | None) -> OpenedModel:
    folder = _base_folder(base or _self_described(origin), origin)
    expected = expected_tensors(folder)
    check_family(expected.config, folder)
    source = torch_dist.MegatronSource(origin, expected.config, expected.shapes, tied=expected.tied)
    return OpenedModel(source, folder, notes=tuple(source.notes))


class _RunSettings(NamedTuple):
    """What the run that wrote a checkpoint says about the model in it (meta.json)."""

    model: dict[str, Any]  # the section `model` of its configuration; empty without meta.json
    adapter_name: str  # in the names of the adapter's factors


def _open_checkpoint(origin: Path, base: str | None, which: str | None) -> OpenedModel:
    source = dcp.DcpSource(origin, which)
    trained, adapter_name = _run_settings(origin, which)
    name = base or _self_described(origin) or trained.get("path")
    tokenizer = Path(trained["tokenizer"]) if trained.get("tokenizer") else None
    if any(".lora_" in tensor for tensor in source.specs):
        if not trained.get("lora"):
            raise UserError(
                f"{origin} holds adapters, and no meta.json that says their alpha: give a whole checkpoint"
            )
        adapter = _read_trained_adapter(source, trained["lora"], origin, adapter_name)
        return _with_base(adapter, name, origin, tokenizer)
    folder = _base_folder(name, origin)
    expected = expected_tensors(folder)
    source.split_experts(expert_slices(expected.config.model_type, expected.shapes))
    check_tensors(source.specs, expected.shapes, {HEAD} if expected.tied else set(), origin, folder)
    return OpenedModel(source, folder, tokenizer=tokenizer)


def _run_settings(origin: Path, which: str | None) -> _RunSettings:
    if not (origin / "meta.json").exists():
        return _RunSettings({}, DEFAULT_ADAPTER)
    config = json.loads((origin / "meta.json").read_text()).get("config", {})
    model, two_models = config.get("model", {}), config.get("two_models") or {}
    if which == AGGREGATION and two_models.get("aggregation_model"):
        tokenizer = model.get("tokenizer") or model.get("path")
        model = two_models["aggregation_model"] | {"tokenizer": tokenizer}
    if which is not None and two_models.get("form") == "adapters":
        return _RunSettings(model, adapter_name=which)
    return _RunSettings(model, DEFAULT_ADAPTER)


def _read_trained_adapter(source: Source, lora: dict[str, Any], origin: Path, name: str) -> Adapter:
    """Read the adapter `name` from the trainer's checkpoint.

    `lora` is model.lora of its configuration.
    """
    # FSDP2's checkpoints include the adapter's name, megatron-core's have PEFT's names.
    tensors = {
        tensor.replace(f".{name}.weight", ".weight"): read_whole(source, tensor)
        for tensor in source.specs
    }
    return Adapter.from_factors(tensors, int(lora["rank"]), float(lora["alpha"]), origin)


def _with_base(
    adapter: Adapter,
    name: str | None,
    origin: Path,
    tokenizer: Path | None,
) -> OpenedModel:
    folder = _base_folder(name, origin)
    expected = expected_tensors(folder)
    source = _open_safetensors(folder, expected)
    check_adapter(adapter, expected.shapes, origin, folder)
    return OpenedModel(source, folder, adapter, tokenizer, str(name))


def _self_described(origin: Path) -> str | None:
    return str(origin) if (origin / "config.json").exists() else None


def _base_folder(name: str | None, origin: Path) -> Path:
    """Return the folder of the model `name`, downloading it if it is no folder.

    Raises UserError if that fails.
    """
    if name is None:
        raise UserError(
            f"{origin} does not name the model that it belongs to: give its folder by --base"
        )
    folder = Path(name)
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(name))
        except Exception as error:  # no network, no such model, no rights
            raise UserError(
                f"the base {name!r} of {origin} is no folder and cannot be downloaded ({error}): "
                "use --base"
            ) from error
    if not (folder / "config.json").exists():
        raise UserError(
            f"the base {folder} of {origin} has no config.json: give the model's folder by --base"
        )
    return folder
