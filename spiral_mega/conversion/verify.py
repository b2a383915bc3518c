"""Logits of what was converted against those of what it was made of, each computed by other code than wrote it."""

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

from spiral_mega.conversion import dcp, peft_adapters, torch_dist
from spiral_mega.conversion.peft_adapters import Adapter
from spiral_mega.conversion.sources import Source, digest, whole
from spiral_mega.errors import UserError
from spiral_mega.models.safetensors_files import read_file
from spiral_mega.models.tensor_names import checkpoint_tensors
from spiral_mega.models.weights import weight_shapes
from spiral_mega.policy.fsdp.sharded_model import materialise

TOKENS = 48
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# Of log-probs, where an adapter was merged into weights that round: what the two ends may differ by.
MERGED_GAP = {torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.05}


def verify_logits(model: Any, target: Path, to: str) -> str:
    """Compare on random tokens and say how far apart the ends are. Raises UserError when they are too far.

    Whole weights must give the same bits, at the target's precision. Merged ones are compared with the base and its
    adapter kept apart, in float32. One model is in memory at a time.
    """
    tokens = _tokens(model.folder)
    if model.adapter is None:
        dtype = _dtype(target)
        written = _logits(_read_back(target, to, dtype), tokens)
        original = _logits(_from_source(model.source, model.folder, dtype), tokens)
        if not torch.equal(written, original):
            raise UserError(f"verification failed: logits differ by up to {_gap(written, original):.3g}: report this")
        return f"logits of both ends are equal, bit for bit, on {TOKENS} tokens ({dtype})"
    base = _from_folder(model.folder, torch.float32)
    plain = _logits(base, tokens)
    apart = _logits(_with_adapter(base, model.adapter), tokens)
    if to == "peft":
        written = _logits(PeftModel.from_pretrained(_from_folder(model.folder, torch.float32), str(target)), tokens)
        limit = MERGED_GAP[torch.float32] if _adapter_dtype(target) == torch.float32 else MERGED_GAP[torch.bfloat16]
    else:
        written = _logits(_from_folder(target, torch.float32), tokens)
        limit = MERGED_GAP[_dtype(target)]
    gap = _gap(written, apart)
    if not gap <= limit:
        raise UserError(f"verification failed: log-probs differ by up to {gap:.3g} (at most {limit}): report this")
    away = _gap(plain, apart)
    return f"log-probs of both ends are within {gap:.2g} on {TOKENS} tokens; the base's own are {away:.2g} away"


def _tokens(folder: Path) -> torch.Tensor:
    vocabulary = AutoConfig.from_pretrained(folder).get_text_config().vocab_size
    return torch.randint(vocabulary, (1, TOKENS), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def _logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model.eval()(input_ids=tokens, use_cache=False).logits[0]
    del model
    gc.collect()
    return logits


def _gap(a: torch.Tensor, b: torch.Tensor) -> float:
    difference = a.float().log_softmax(-1) - b.float().log_softmax(-1)
    return float(difference.abs().nan_to_num(nan=float("inf")).max())


def _dtype(folder: Path) -> torch.dtype:
    found = getattr(AutoConfig.from_pretrained(folder), "dtype", None)
    return found if isinstance(found, torch.dtype) else torch.float32


def _adapter_dtype(folder: Path) -> torch.dtype:
    stored = read_file(folder / peft_adapters.WEIGHTS)
    return next(iter(stored.values())).form.dtype


def _from_folder(folder: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def _read_back(folder: Path, to: str, dtype: torch.dtype) -> Any:
    if to == "hf":
        return _from_folder(folder, dtype)
    config = AutoConfig.from_pretrained(folder)
    if to != "torch_dist":
        return _from_source(dcp.DcpSource(folder), folder, dtype)
    tied = config.get_text_config().tie_word_embeddings
    return _from_source(torch_dist.MegatronSource(folder, config, weight_shapes(str(folder)), tied=tied), folder, dtype)


def _from_source(source: Source, folder: Path, dtype: torch.dtype) -> Any:
    """The model of the config in `folder` with the tensors of `source`, rounded to `dtype`."""
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
    text = model.config.get_text_config()
    if HEAD in source.forms and digest(source, HEAD) != digest(source, EMBEDDING):
        text.tie_word_embeddings = False
    materialise(model, torch.device("cpu"))
    model.tie_weights()
    for own, parameter in model.named_parameters():
        named: Iterable[tuple[str, torch.Tensor]] = [(own, parameter.data)]
        if own not in source.forms:
            named = checkpoint_tensors(model.config.model_type, named)
        for name, tensor in named:
            if name not in source.forms:
                raise UserError(f"verification failed: no {name}")
            tensor.copy_(whole(source, name))
    return model


def _with_adapter(base: Any, adapter: Adapter) -> Any:
    """`base` computing with the factors beside it, as peft does."""
    config = peft_adapters.peft_config(adapter, "base")
    config.inference_mode = False
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=".*(tie|renamed).*"
        )  # the head is untied by its adapter, which is meant
        model = get_peft_model(base, config)
    loaded = set_peft_model_state_dict(model, peft_adapters.peft_tensors(adapter))
    if loaded.unexpected_keys:
        raise UserError(f"verification failed: peft does not know {loaded.unexpected_keys[:3]}")
    return model
