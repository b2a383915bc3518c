"""Checks of what a configuration names: the model's files, tokenizer and template, the problems and their verifier."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

from spiral_mega.config import Config
from spiral_mega.config.model_set import model_configs
from spiral_mega.data.problems import load_sources
from spiral_mega.doctor.finding import Finding, error, ok, warning
from spiral_mega.errors import UserError
from spiral_mega.models.model_config import read_model_config
from spiral_mega.models.safetensors_files import read_model_files, shorten
from spiral_mega.models.tokenizer import load_tokenizer, stop_ids
from spiral_mega.models.weights import meta_model
from spiral_mega.prompts.prompter import Prompter
from spiral_mega.rewards.verifier import make_verifier_pool
from spiral_mega.traces import Problem
from spiral_mega.validation.models import check_models

MASTER_AND_MOMENTS = 12  # bytes a trained weight in a checkpoint: float32 weight and Adam's two moments
STARTING_SECONDS = 60.0


def room_needed(config: Config) -> int:
    """Bytes that the run's checkpoints and export take at the most; 0 for a model that cannot be read."""
    return sum(_room_of(each, trained=name != config.frozen) for name, each in model_configs(config).items())


def _room_of(config: Config, *, trained: bool) -> int:
    try:
        model = meta_model(config.model.path)
    except (UserError, OSError, ValueError):
        return 0
    whole = sum(parameter.numel() for parameter in model.parameters())
    learning = whole
    if (lora := config.model.lora) is not None:
        linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        adapted = [module for name, module in linear.items() if name.rpartition(".")[2] in lora.targets]
        learning = sum(lora.rank * (module.in_features + module.out_features) for module in adapted)
    dtype = getattr(read_model_config(config.model.path), "dtype", None) or torch.float32
    export = whole * dtype.itemsize if config.checkpoint.save_hf else 0
    return trained * MASTER_AND_MOMENTS * learning * (config.checkpoint.keep_last + 1) + export


def model_files(config: Config) -> Iterator[Finding]:
    """Whether the files of each model are whole and hold the tensors that its config calls for."""
    check_models(config)
    for path in dict.fromkeys(each.model.path for each in model_configs(config).values()):
        yield from _files_of(path)


def _files_of(path: str) -> Iterator[Finding]:
    hf_config = read_model_config(path)
    folder = Path(path)
    if not folder.is_dir():
        yield ok("model", f"{path}, {hf_config.model_type}, from the hub's cache: its files are not looked at")
        return
    stored = read_model_files(folder)
    expected = {name: parameter.shape for name, parameter in meta_model(path).named_parameters()}
    if missing := sorted(expected.keys() - stored.keys()):
        yield error("model", f"{folder} has no {shorten(missing)}: copy the model again")
    shapes = [name for name in expected.keys() & stored.keys() if expected[name] != stored[name].form.shape]
    if shapes:
        name = min(shapes)
        yield error(
            "model",
            f"{name} in {folder} is {tuple(stored[name].form.shape)}, by its config.json {tuple(expected[name])}: they "
            "do not belong together; copy the model again",
        )
    if not missing and not shapes:
        count = sum(math.prod(shape) for shape in expected.values())
        yield ok("model", f"{folder}, {hf_config.model_type}, {count / 1e6:,.1f} M parameters, files whole")


def tokenizer(config: Config) -> Iterator[Finding]:
    """Tokenizer, chat template and end tokens, as the run will use them."""
    loaded = load_tokenizer(config.model)
    prompter = Prompter(config.prompts, loaded)
    yield ok("tokenizer", f"{len(loaded)} tokens, chat template of {len(str(loaded.chat_template))} characters")
    ends = stop_ids(config.model, loaded)
    yield ok("end tokens", ", ".join(f"{index} {loaded.convert_ids_to_tokens(index)}" for index in sorted(ends)))
    # A turn is closed by a control token behind the message's text. If no end token is among those that the template
    # writes there, responses run to the length limit and every one of them counts as unfinished.
    answered = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    try:
        ids = loaded.apply_chat_template(answered, return_dict=False, **prompter.config.chat_template_kwargs)
    except Exception as problem:  # a template may raise anything
        yield warning("chat template", f"it refuses an assistant's turn ({problem}); sampling does not need one")
        return
    if ends.isdisjoint(ids[-3:]):
        yield warning(
            "chat template",
            f"it closes an assistant's turn with {loaded.convert_ids_to_tokens(ids[-3:])}, none of which ends a "
            "response, so responses may run to rollout.sampling.max_response_tokens: name that token in generation_config.json "
            "(eos_token_id)",
        )
    else:
        yield ok("chat template", "it closes a turn with an end token")


def problems_and_verifier(config: Config) -> Iterator[Finding]:
    """Whether problems load, and each kind's verifier answers in its processes within its limit."""
    by_kind: dict[str, Problem] = {}
    for name, sources in (("data.train", config.data.train), ("data.eval", config.data.eval)):
        if sources:
            problems = load_sources(sources)
            by_kind |= {problem.verifier: problem for problem in problems}
            yield ok(name, f"{len(problems)} problems")
    with make_verifier_pool(config.rewards, list(by_kind.values())) as verifier:
        for kind, problem in by_kind.items():
            # Its own answer, as the kind's format puts it where it is known; what counts is that a number comes back.
            response = f"\\boxed{{{problem.answer[0]}}}" if kind == "math" else problem.answer[0]
            verdict = verifier.submit(response, list(problem.answer), kind).result(STARTING_SECONDS)
            if verdict.status != "ok":
                yield error(
                    "verifier",
                    f"{kind} on problem {problem.id!r}: {verdict.status} ({verdict.detail}); a response would score 0",
                )
            elif kind in ("math", "exact") and verdict.reward != 1.0:
                yield error(
                    "verifier",
                    f"{kind} gives {verdict.reward} for the very answer {problem.answer[0]!r} of {problem.id!r}, "
                    "which is not of a form that it reads: use verifier: exact, or correct the data",
                )
            else:
                yield ok("verifier", f"{kind} answers ({verdict.reward:g} for the ground truth of {problem.id!r})")


CHECKS: list[tuple[str, Callable[[Config], Iterator[Finding]]]] = [
    ("model", model_files),
    ("tokenizer", tokenizer),
    ("problems and verifier", problems_and_verifier),
]
