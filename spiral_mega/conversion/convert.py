"""From one form of a model to another, whole or not at all."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download

from spiral_mega.conversion import dcp, peft_adapters, torch_dist
from spiral_mega.conversion.checks import check_tensors
from spiral_mega.conversion.peft_adapters import Adapter
from spiral_mega.conversion.sources import MergedSource, SafetensorsSource, Source, digest
from spiral_mega.errors import UserError
from spiral_mega.models.safetensors_files import Form, ShardedWriter
from spiral_mega.models.tensor_names import checkpoint_tensors, expert_places
from spiral_mega.models.weights import meta_model
from spiral_mega.policy.lora import ADAPTER
from spiral_mega.policy.megatron.families import FAMILIES
from spiral_mega.traces import AGGREGATION

log = logging.getLogger(__name__)

FORMS = ("hf", "dcp", "dcp-megatron", "torch_dist", "peft")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MANIFEST = "SHA256SUMS"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# Weights, in any form, and what speaks of the files of the source: all else travels along.
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.distcp")
LEFT_BEHIND = (
    *(*WEIGHTS, "*.gguf", ".*", "meta.json", "manifest.json", "adapter_config.json"),
    *(torch_dist.CONFIG, torch_dist.COMMON, MANIFEST),
)


@dataclass(frozen=True, slots=True)
class Model:
    """What is converted: whole weights from `source` or, with `adapter`, a low-rank update of those.

    `folder` holds the config and all that travels along; `tokenizer` is set where that comes from elsewhere.
    """

    source: Source
    folder: Path
    adapter: Adapter | None = None
    tokenizer: Path | None = None
    base_name: str = ""
    notes: tuple[str, ...] = ()  # what the user should know of how it was read


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
    """Write the model at `origin` to `target` in the form `to`, and return what was done, line by line.

    `origin`: a Hugging Face folder, a checkpoint (step_NNNNNN, or megatron-core's) or a PEFT adapter; the last two need
    a `base`, unless they name one. `model`: of a checkpoint of two, which. To "hf" adapters are merged. `dtype`: of
    floating-point tensors; None keeps each tensor's own (for a merge, its base's). `verify` compares logits of both
    ends afterwards. Raises UserError, and leaves nothing at `target`, when origin and base do not fit each other or the
    forms.
    """
    opened = _open(origin, base, model)
    if opened.adapter is None and to == "peft":
        raise UserError(f"{origin} holds whole weights and no adapter: convert it to hf or dcp")
    if opened.adapter is not None and to not in ("hf", "peft"):
        raise UserError(f"{origin} is an adapter: convert it to peft, or to hf, which merges it into its base")
    with _whole_folder(target) as partial:
        if to == "peft":
            assert opened.adapter is not None
            peft_adapters.write_peft(opened.adapter, opened.base_name, dtype, partial)
        else:
            _write_weights(opened, to, dtype, max_file_bytes, partial)
        _bring_along(opened, partial, config=to != "peft")
        count = _write_manifest(partial)
        size = sum(file.stat().st_size for file in partial.iterdir())
        done = [*opened.notes, f"{target}: {count} files, {size / 1e9:.3f} GB, {MANIFEST}"]
        if verify:
            from spiral_mega.conversion.verify import verify_logits

            done.append(verify_logits(opened, partial, to))
    return done


def _open(origin: Path, base: str | None, which: str | None) -> Model:
    if which is not None and (torch_dist.is_megatron(origin) or not (origin / dcp.METADATA).exists()):
        raise UserError(f"--model is {which}, but {origin} is no checkpoint of two models: leave it out")
    if torch_dist.is_megatron(origin):
        return _open_megatron(origin, base)
    if (origin / dcp.METADATA).exists():
        return _open_checkpoint(origin, base, which)
    if (origin / peft_adapters.CONFIG).exists():
        adapter = peft_adapters.read_peft(origin)
        name = base or json.loads((origin / peft_adapters.CONFIG).read_text()).get("base_model_name_or_path")
        return _adapted(adapter, name, origin, origin if list(origin.glob("tokenizer*")) else None)
    if (origin / "config.json").exists():
        source = SafetensorsSource(origin)
        _check(source, origin, origin)
        return Model(source, origin)
    newest = max((path.parent for path in origin.glob("checkpoints/step_*/.metadata")), default=None)
    hint = f"; it is a run, so name a checkpoint, such as {newest}" if newest else ""
    raise UserError(
        f"{origin} is neither a model (config.json), a checkpoint (.metadata) nor adapter (adapter_config.json){hint}"
    )


def _open_checkpoint(origin: Path, base: str | None, which: str | None) -> Model:
    source = dcp.DcpSource(origin, which)
    trained: dict[str, Any] = {}
    adapter = ADAPTER
    if (origin / "meta.json").exists():
        config = json.loads((origin / "meta.json").read_text()).get("config", {})
        trained, two = config.get("model", {}), config.get("two_models") or {}
        if which == AGGREGATION and two.get("aggregation_model"):
            trained = two["aggregation_model"] | {"tokenizer": trained.get("tokenizer") or trained.get("path")}
        adapter = which if which is not None and two.get("form") == "adapters" else ADAPTER
    name = base or (str(origin) if (origin / "config.json").exists() else trained.get("path"))
    tokenizer = Path(trained["tokenizer"]) if trained.get("tokenizer") else None
    if any(".lora_" in tensor for tensor in source.forms):
        if not trained.get("lora"):
            raise UserError(
                f"{origin} holds adapters, and no meta.json that tells their alpha: give a whole checkpoint"
            )
        return _adapted(peft_adapters.read_trained(source, trained["lora"], origin, adapter), name, origin, tokenizer)
    folder = _base_folder(name, origin)
    shapes, tied, config = _expected(folder)
    source.part_experts(expert_places(config.model_type, shapes))
    check_tensors(source.forms, shapes, {HEAD} if tied else set(), origin, folder)
    return Model(source, folder, tokenizer=tokenizer)


def _open_megatron(origin: Path, base: str | None) -> Model:
    folder = _base_folder(base or (str(origin) if (origin / "config.json").exists() else None), origin)
    shapes, tied, config = _expected(folder)
    _check_family(config, folder)
    source = torch_dist.MegatronSource(origin, config, shapes, tied=tied)
    return Model(source, folder, notes=tuple(source.notes))


def _adapted(adapter: Adapter, name: str | None, origin: Path, tokenizer: Path | None) -> Model:
    folder = _base_folder(name, origin)
    source = SafetensorsSource(folder)
    _check(source, folder, folder)
    peft_adapters.check_adapter(adapter, _expected(folder)[0], origin, folder)
    return Model(source, folder, adapter, tokenizer, str(name))


def _base_folder(name: str | None, origin: Path) -> Path:
    if name is None:
        raise UserError(f"{origin} does not name the model that it belongs to: give its folder by --base")
    folder = Path(name)
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(name))
        except Exception as error:  # no network, no such model, no rights
            raise UserError(
                f"the base {name!r} of {origin} is no folder and not to be had ({error}): use --base"
            ) from error
    if not (folder / "config.json").exists():
        raise UserError(f"the base {folder} of {origin} has no config.json: give the model's folder by --base")
    return folder


def _expected(folder: Path) -> tuple[dict[str, torch.Size], bool, Any]:
    """By the config in `folder`: name and shape of each weight in a file, whether the head is tied to the embedding,
    and the config itself."""
    try:
        model = meta_model(str(folder))
    except Exception as error:  # a config of the wrong form fails in many ways
        raise UserError(f"{folder / 'config.json'} is not that of a causal language model: {error}") from error
    config = model.config
    named = checkpoint_tensors(config.model_type, model.named_parameters(remove_duplicate=False))
    shapes = {name: parameter.shape for name, parameter in named}
    shapes |= {name: buffer.shape for name, buffer in model.named_buffers() if name in model.state_dict()}
    return shapes, bool(config.get_text_config().tie_word_embeddings), config


def _check(source: Source, origin: Path, folder: Path) -> None:
    shapes, tied, _ = _expected(folder)
    check_tensors(source.forms, shapes, {HEAD} if tied else set(), origin, folder)


def _write_weights(model: Model, to: str, dtype: torch.dtype | None, max_file_bytes: int, folder: Path) -> None:
    source = model.source
    _, tied_before, config = _expected(model.folder)
    tied = tied_before
    if model.adapter is not None:
        head = (HEAD, EMBEDDING) if tied and HEAD in model.adapter.updates else None
        source, tied = MergedSource(source, model.adapter.updates, head), tied and head is None
    elif tied and HEAD in source.forms:
        tied = digest(source, HEAD) == digest(source, EMBEDDING)
    forms = {name: Form(form.shape, _rounded(form.dtype, dtype)) for name, form in source.forms.items()}
    if tied:
        forms.pop(HEAD, None)
    if to == "dcp":  # which names a tied head, as the trainer does
        aliases = {HEAD: EMBEDDING} if tied else {}
        named = forms | {head: forms[origin] for head, origin in aliases.items()}
        places = expert_places(config.model_type, {name: form.shape for name, form in forms.items()})
        dcp.write_dcp(source, named, folder, dcp.FSDP, aliases, places)
    elif to == "dcp-megatron":
        _check_family(config, model.folder)
        dcp.write_dcp(source, forms, folder, dcp.MEGATRON)
    elif to == "torch_dist":
        _check_family(config, model.folder)
        torch_dist.write_megatron(source, forms, config, tied=tied, folder=folder)
    else:
        writer = ShardedWriter(folder, forms, max_file_bytes)
        for name in forms:
            for rows in source.blocks(name):
                writer.add_rows(name, rows.start if rows else 0, source.read(name, rows))
        writer.finish()
    settings = json.loads((model.folder / "config.json").read_text())
    _set_types(settings, {form.dtype for form in forms.values() if form.dtype.is_floating_point})
    if tied != tied_before:
        settings["tie_word_embeddings"] = tied
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _check_family(config: Any, folder: Path) -> None:
    if config.model_type not in FAMILIES:
        raise UserError(
            f"{folder} is a model of type {config.model_type!r}, which is not converted to or from megatron-core: "
            f"{', '.join(FAMILIES)} are"
        )


def _rounded(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and own.is_floating_point else own


def _set_types(settings: dict[str, Any], types: set[torch.dtype]) -> None:
    """Name the weights' type in a config, wherever it names one; a mixture is left as it was."""
    if len(types) != 1:
        return
    for key, value in settings.items():
        if key in ("dtype", "torch_dtype") and value is not None:
            settings[key] = str(next(iter(types))).removeprefix("torch.")
        elif isinstance(value, dict) and key.endswith("_config"):
            _set_types(value, types)


def _bring_along(model: Model, folder: Path, *, config: bool) -> None:
    """Copy what is not weights and not there yet: tokenizer, chat template, generation config, licence, code."""
    for place in (model.tokenizer, model.folder):
        for file in sorted(place.iterdir()) if place is not None else []:
            wanted = file.is_file() and not any(file.match(pattern) for pattern in LEFT_BEHIND)
            if not config and file.name in ("config.json", "generation_config.json"):
                continue
            if wanted and not (folder / file.name).exists():
                shutil.copyfile(file, folder / file.name)


def _write_manifest(folder: Path) -> int:
    lines = []
    for file in sorted(folder.iterdir()):
        with file.open("rb") as content:
            lines.append(f"{hashlib.file_digest(content, 'sha256').hexdigest()}  {file.name}\n")
    (folder / MANIFEST).write_text("".join(lines))
    return len(lines)


@contextmanager
def _whole_folder(target: Path) -> Iterator[Path]:
    """A folder to write to that gets its name when all went well, and is removed when not."""
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
