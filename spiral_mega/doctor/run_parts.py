"""Checks of what a configuration names: disk space, model, tokenizer, problems, verifiers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from spiral_mega.config import Config
from spiral_mega.config.model_set import model_configs
from spiral_mega.data.problems import load_sources
from spiral_mega.doctor import machine
from spiral_mega.doctor.finding import Finding, error, ok, warning
from spiral_mega.errors import UserError
from spiral_mega.models.model_config import read_model_config
from spiral_mega.models.safetensors_files import read_model_files, shorten
from spiral_mega.models.tokenizer import load_tokenizer, stop_ids
from spiral_mega.models.weights import meta_model
from spiral_mega.prompts.prompter import Prompter
from spiral_mega.rewards.verifier import VerifierPool, make_verifier_pool
from spiral_mega.traces import Problem
from spiral_mega.validation.models import check_models

CHECKPOINT_BYTES_PER_WEIGHT = 12  # of a trained weight: float32 weight and Adam's two moments
START_LIMIT_S = 60.0  # for a verifier process to start and answer


def disk(config: Config) -> Iterator[Finding]:
    """Check that run.dir has room for the run's checkpoints and export."""
    yield from machine.disk(Path(config.run.dir), needed_bytes=_disk_bytes(config))


def _disk_bytes(config: Config) -> int:
    """Return the most bytes that checkpoints and export take; 0 for a model that is not readable."""
    configs = model_configs(config).items()
    return sum(_model_disk_bytes(each, trained=name != config.frozen) for name, each in configs)


def _model_disk_bytes(config: Config, *, trained: bool) -> int:
    try:
        model = meta_model(config.model.path)
    except (UserError, OSError, ValueError):
        return 0
    weights = sum(parameter.numel() for parameter in model.parameters())
    dtype = getattr(read_model_config(config.model.path), "dtype", None) or torch.float32
    export = weights * dtype.itemsize if config.checkpoint.save_hf else 0
    if not trained:
        return export
    trained_weights = weights if config.model.lora is None else _adapter_weights(model, config)
    return (
        CHECKPOINT_BYTES_PER_WEIGHT * trained_weights * (config.checkpoint.keep_last + 1) + export
    )


def _adapter_weights(model: nn.Module, config: Config) -> int:
    """Return the number of weights of the adapters that model.lora adds."""
    lora = config.model.lora
    assert lora is not None
    count = 0
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in lora.targets:
            count += lora.rank * (module.in_features + module.out_features)
    return count


def model_files(config: Config) -> Iterator[Finding]:
    """Check that each model's files are complete and hold the tensors of its config.json."""
    check_models(config)
    for path in dict.fromkeys(each.model.path for each in model_configs(config).values()):
        yield from _files_of(path)


def _files_of(path: str) -> Iterator[Finding]:
    hf_config = read_model_config(path)
    folder = Path(path)
    if not folder.is_dir():
        yield ok(
            "model",
            f"{path}, {hf_config.model_type}, from the hub's cache: its files are not checked",
        )
        return
    stored = read_model_files(folder)
    expected = {name: parameter.shape for name, parameter in meta_model(path).named_parameters()}
    if missing := sorted(expected.keys() - stored.keys()):
        yield error("model", f"{folder} has no {shorten(missing)}: copy the model again")
    shapes = [
        name
        for name in expected.keys() & stored.keys()
        if expected[name] != stored[name].spec.shape
    ]
    if shapes:
        name = min(shapes)
        yield error(
            "model",
            f"{name} in {folder} is {tuple(stored[name].spec.shape)}, by its config.json "
            f"{tuple(expected[name])}: they do not belong together; copy the model again",
        )
    if not missing and not shapes:
        count = sum(math.prod(shape) for shape in expected.values())
        yield ok(
            "model",
            f"{folder}, {hf_config.model_type}, {count / 1e6:,.1f} M parameters, files complete",
        )


def tokenizer(config: Config) -> Iterator[Finding]:
    """Check tokenizer, chat template and end tokens as the run will use them."""
    loaded = load_tokenizer(config.model)
    prompter = Prompter(config.prompts, loaded)
    yield ok(
        "tokenizer",
        f"{len(loaded)} tokens, chat template of {len(str(loaded.chat_template))} characters",
    )
    ends = stop_ids(config.model, loaded)
    names = [f"{index} {loaded.convert_ids_to_tokens(index)}" for index in sorted(ends)]
    yield ok("end tokens", ", ".join(names))
    # The template closes a turn with a control token after the message's text. If no end token is
    # among those that it writes there, responses run to the length limit and all of them count as
    # unfinished.
    answered = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    try:
        ids = loaded.apply_chat_template(
            answered, return_dict=False, **prompter.config.chat_template_kwargs
        )
    except Exception as problem:  # a template may raise anything
        yield warning(
            "chat template",
            f"it refuses an assistant's turn ({problem}); sampling does not need one",
        )
        return
    if ends.isdisjoint(ids[-3:]):
        yield warning(
            "chat template",
            f"it closes an assistant's turn with {loaded.convert_ids_to_tokens(ids[-3:])}, none of "
            "which ends a response, so responses may run to rollout.sampling.max_response_tokens: "
            "name that token in generation_config.json (eos_token_id)",
        )
    else:
        yield ok("chat template", "it closes a turn with an end token")


def problems_and_verifier(config: Config) -> Iterator[Finding]:
    """Check that the problems load, and that each verifier answers within the time limit."""
    examples: dict[str, Problem] = {}
    for name, sources in (("data.train", config.data.train), ("data.eval", config.data.eval)):
        if sources:
            problems = load_sources(sources)
            examples |= {problem.verifier: problem for problem in problems}
            yield ok(name, f"{len(problems)} problems")
    with make_verifier_pool(config.rewards, examples.values()) as pool:
        for verifier, problem in examples.items():
            yield _verify_own_answer(pool, verifier, problem)


def _verify_own_answer(pool: VerifierPool, verifier: str, problem: Problem) -> Finding:
    """Verify the problem's own answer, boxed for math. Of a user's verifier any number will do."""
    response = f"\\boxed{{{problem.answer[0]}}}" if verifier == "math" else problem.answer[0]
    verdict = pool.submit(response, list(problem.answer), verifier).result(START_LIMIT_S)
    if verdict.status != "ok":
        return error(
            "verifier",
            f"{verifier} on problem {problem.id!r}: {verdict.status} ({verdict.detail}); a "
            "response would score 0",
        )
    if verifier in ("math", "exact") and verdict.reward != 1.0:
        return error(
            "verifier",
            f"{verifier} gives {verdict.reward} for the very answer {problem.answer[0]!r} of "
            f"{problem.id!r}, which is not of a form that it reads: use verifier: exact, or "
            "correct the data",
        )
    return ok(
        "verifier",
        f"{verifier} answers ({verdict.reward:g} for the ground truth of {problem.id!r})",
    )
