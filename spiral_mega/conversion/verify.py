"""Compare logits of a converted model and its origin, each loaded by other code than wrote it."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from peft import PeftModel, get_peft_model, set_peft_model_state_dict
from transformers import AutoConfig, AutoModelForCausalLM

from spiral_mega.conversion import dcp, torch_dist
from spiral_mega.conversion.open_model import OpenedModel
from spiral_mega.conversion.sources import Source, digest, read_whole
from spiral_mega.errors import UserError
from spiral_mega.models import peft_files
from spiral_mega.models.peft_files import Adapter
from spiral_mega.models.safetensors_files import read_file
from spiral_mega.models.tensor_names import EMBEDDING, HEAD, to_checkpoint_names
from spiral_mega.models.weights import weight_shapes
from spiral_mega.policy.fsdp.sharded_model import allocate_weights

NUM_TOKENS = 48
# Largest difference of log-probs where an adapter was merged into weights that are rounded to this
# dtype.
MERGED_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.05}


def verify_logits(model: OpenedModel, target: Path, to: str) -> str:
    """Compare both ends on random tokens, and return how far apart they are.

    Raises UserError if they are too far. Whole weights must give the same bits at the target's
    dtype. A merged adapter is compared with base and unmerged adapter in float32. One model is in
    memory at a time.
    """
    if model.adapter is None:
        return _verify_weights(model, target, to)
    return _verify_adapter(model, model.adapter, target, to)


def _verify_weights(model: OpenedModel, target: Path, to: str) -> str:
    tokens = _random_tokens(model.folder)
    dtype = _weights_dtype(target)
    written = _logits(_load_target(target, to, dtype), tokens)
    original = _logits(_load_source(model.source, model.folder, dtype), tokens)
    if not torch.equal(written, original):
        difference = _max_logprob_difference(written, original)
        raise UserError(
            f"verification failed: logits differ by up to {difference:.3g}: report this"
        )
    return f"logits of both ends are equal, bit for bit, on {NUM_TOKENS} tokens ({dtype})"


def _verify_adapter(model: OpenedModel, adapter: Adapter, target: Path, to: str) -> str:
    tokens = _random_tokens(model.folder)
    base = _load_folder(model.folder, torch.float32)
    base_logits = _logits(base, tokens)
    original = _logits(_with_adapter(base, adapter), tokens)
    del base
    if to == "peft":
        loaded = PeftModel.from_pretrained(_load_folder(model.folder, torch.float32), str(target))
        exact = _adapter_dtype(target) == torch.float32
        tolerance = MERGED_TOLERANCE[torch.float32 if exact else torch.bfloat16]
    else:
        loaded = _load_folder(target, torch.float32)
        tolerance = MERGED_TOLERANCE[_weights_dtype(target)]
    written = _logits(loaded, tokens)
    difference = _max_logprob_difference(written, original)
    if not difference <= tolerance:
        raise UserError(
            f"verification failed: log-probs differ by up to {difference:.3g} (at most "
            f"{tolerance}): report this"
        )
    effect = _max_logprob_difference(base_logits, original)
    return (
        f"log-probs of both ends are within {difference:.2g} on {NUM_TOKENS} tokens; those of the "
        f"base alone differ by {effect:.2g}"
    )


def _random_tokens(folder: Path) -> torch.Tensor:
    vocabulary = AutoConfig.from_pretrained(folder).get_text_config().vocab_size
    return torch.randint(vocabulary, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def _logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model.eval()(input_ids=tokens, use_cache=False).logits[0]
    del model
    gc.collect()
    return logits


def _max_logprob_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    difference = a.float().log_softmax(-1) - b.float().log_softmax(-1)
    return float(difference.abs().nan_to_num(nan=float("inf")).max())


def _weights_dtype(folder: Path) -> torch.dtype:
    found = getattr(AutoConfig.from_pretrained(folder), "dtype", None)
    return found if isinstance(found, torch.dtype) else torch.float32


def _adapter_dtype(folder: Path) -> torch.dtype:
    stored = read_file(folder / peft_files.WEIGHTS)
    return next(iter(stored.values())).spec.dtype


def _load_folder(folder: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def _load_target(folder: Path, to: str, dtype: torch.dtype) -> Any:
    if to == "hf":
        return _load_folder(folder, dtype)
    if to != "torch_dist":
        return _load_source(dcp.DcpSource(folder), folder, dtype)
    config = AutoConfig.from_pretrained(folder)
    tied = config.get_text_config().tie_word_embeddings
    source = torch_dist.MegatronSource(folder, config, weight_shapes(str(folder)), tied=tied)
    return _load_source(source, folder, dtype)


def _load_source(source: Source, folder: Path, dtype: torch.dtype) -> Any:
    """Load the tensors of `source`, rounded to `dtype`, into the model of the config in `folder`."""
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
    if HEAD in source.specs and digest(source, HEAD) != digest(source, EMBEDDING):
        model.config.get_text_config().tie_word_embeddings = False
    allocate_weights(model, torch.device("cpu"))
    model.tie_weights()
    for own_name, parameter in model.named_parameters():
        named: Iterable[tuple[str, torch.Tensor]] = [(own_name, parameter.data)]
        if own_name not in source.specs:
            named = to_checkpoint_names(model.config.model_type, named)
        for name, tensor in named:
            if name not in source.specs:
                raise UserError(f"verification failed: no {name}")
            tensor.copy_(read_whole(source, name))
    return model


def _with_adapter(base: Any, adapter: Adapter) -> Any:
    """Wrap `base` in PEFT's model, which adds the adapter's update without merging it."""
    config = adapter.peft_config("base")
    config.inference_mode = False
    with warnings.catch_warnings():
        # peft warns that the head is untied by its adapter, which is intended.
        warnings.filterwarnings("ignore", message=".*(tie|renamed).*")
        model = get_peft_model(base, config)
    loaded = set_peft_model_state_dict(model, adapter.factors())
    if loaded.unexpected_keys:
        raise UserError(f"verification failed: peft does not know {loaded.unexpected_keys[:3]}")
    return model
