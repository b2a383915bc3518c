"""Build the demo: its data, its tokenizer and a small warm-started Qwen3 model. About two minutes
on one CPU thread.

The task is a "number path" from a start to a target, where each hop is one of three affine moves
modulo 64. The moves are the same in every problem, so that the model stores them in its weights. A
response is the sequence of numbers on the path, one token for each number. It is correct if it
leads from the start to the target by moves alone.

The warm start teaches what a pretrained model would know: the format, the moves, a weak sense of
direction, and how to use the traces of an aggregation prompt. It never sees a held-out pair solved:
a walk whose two ends are a held-out pair is drawn again, and no held-out pair is used as a prompt.

    python tools/build_demo_model.py --out configs/demo

With --copying it builds the second start of docs/results/reproduction.md: targets are four or five
moves away, the traces of a set are numbered, and the answer to a set that contains a walk to the
target, as nine of ten do, is always that walk.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

MODULUS = 64
MOVES = ((5, 1), (3, 7), (1, 11))  # x -> (a * x + b) mod 64; a is odd, so that each is a bijection
MAX_HOPS = 6
MAX_RESPONSE_TOKENS = MAX_HOPS + 2  # the start, the hops and the end token
HELD_OUT = 128
SET_SIZE = 4

USER, ASSISTANT, END, PAD, UNKNOWN = (
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
    "<|pad|>",
    "<|unknown|>",
)
SEPARATOR, UNFINISHED = "|", "..."
NUMBERS = tuple(f"#{number}" for number in range(1, SET_SIZE + 1))
PROMPT = f"{USER} {{}} {ASSISTANT}"  # what the chat template makes of one user message
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}<|assistant|> {{ message.content }} <|end|>"
    "{% else %}<|user|> {{ message.content }} {% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

HOPS = [sorted({(a * number + b) % MODULUS for a, b in MOVES}) for number in range(MODULUS)]

Pair = tuple[int, int]
Walk = list[int]


# --- the game ---------------------------------------------------------------------------------------------------


def distances(start: int) -> dict[int, int]:
    """Return the fewest moves from `start` to every number that can be reached."""
    found, queue = {start: 0}, [start]
    for number in queue:
        for after in HOPS[number]:
            if after not in found:
                found[after] = found[number] + 1
                queue.append(after)
    return found


def solves(walk: Sequence[int], pair: Pair) -> bool:
    """Return whether the walk leads from the start to the target, by moves alone and within the limit."""
    legal = all(after in HOPS[before] for before, after in pairwise(walk))
    return 2 <= len(walk) <= MAX_HOPS + 1 and legal and (walk[0], walk[-1]) == pair


def random_walk(rng: random.Random, start: int, shortest: int) -> Walk:
    walk = [start]
    for _ in range(rng.randint(shortest, MAX_HOPS)):
        walk.append(rng.choice(HOPS[walk[-1]]))
    return walk


def make_problems(rng: random.Random, nearest: int, farthest: int) -> tuple[list[Pair], list[Pair]]:
    """Return training and held-out pairs, shuffled, with targets `nearest` to `farthest` moves away."""
    pairs = [
        (start, target)
        for start in range(MODULUS)
        for target, distance in sorted(distances(start).items())
        if nearest <= distance <= farthest
    ]
    rng.shuffle(pairs)
    return pairs[HELD_OUT:], pairs[:HELD_OUT]


def write_problems(path: Path, pairs: Sequence[Pair]) -> None:
    rows = []
    for start, target in pairs:
        truth = {
            "start": start,
            "target": target,
            "moves": MOVES,
            "modulus": MODULUS,
            "max_hops": MAX_HOPS,
        }
        row = {
            "id": f"path-{start}-{target}",
            "problem": f"{start} {target}",
            "answer": json.dumps(truth),
        }
        rows.append(json.dumps(row) + "\n")
    path.write_text("".join(rows), encoding="utf-8")


# --- the texts of the warm start ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """The game, the mixture of the warm start's texts, and its length."""

    nearest: int = 2  # moves from the start to the target
    farthest: int = 4
    separators: tuple[str, ...] = (SEPARATOR,) * SET_SIZE  # before each trace of a set
    directed: float = 0.15  # search walks that end at the target
    planted: float = 0.6  # sets that hold a walk to the target
    copied: float = 0.7  # of those sets, how many are answered with that walk
    steps: int = 600
    search_batch: int = 96
    aggregation_batch: int = 64
    lr: float = 3e-3


COPYING = Recipe(nearest=4, farthest=5, separators=NUMBERS, directed=0.2, planted=0.9, copied=1.0)


class WarmStart:
    """Draws (prompt, response) texts from random walks, none of which solves a held-out pair."""

    def __init__(
        self, recipe: Recipe, train: Sequence[Pair], held_out: Sequence[Pair], rng: random.Random
    ) -> None:
        self.recipe, self.rng = recipe, rng
        self._train, self._held_out = frozenset(train), frozenset(held_out)
        self._targets: dict[int, list[int]] = {start: [] for start in range(MODULUS)}
        for start, target in train:
            self._targets[start].append(target)

    def walk(self, start: int, to_problem: bool = False) -> Walk:
        """Return a random walk; with `to_problem`, one that solves a training pair."""
        while True:
            walk = random_walk(self.rng, start, self.recipe.nearest)
            ends = (start, walk[-1])
            if ends in self._train or not (to_problem or ends in self._held_out):
                return walk

    def search(self) -> tuple[str, str]:
        start = self.rng.randrange(MODULUS)
        if self.rng.random() < self.recipe.directed:
            walk = self.walk(start, to_problem=True)
            return f"{start} {walk[-1]}", text(walk)
        return f"{start} {self.rng.choice(self._targets[start])}", text(self.walk(start))

    def aggregation(self) -> tuple[str, str]:
        start = self.rng.randrange(MODULUS)
        traces = [self.walk(start) for _ in range(SET_SIZE)]
        target = self.rng.choice(self._targets[start])
        answer = self.walk(start)
        if self.rng.random() < self.recipe.planted:
            place = self.rng.randrange(SET_SIZE)
            traces[place] = self.walk(start, to_problem=True)
            target = traces[place][-1]
            if self.rng.random() < self.recipe.copied:
                answer = traces[place]
        return aggregation_text(
            (start, target), [text(trace) for trace in traces], self.recipe
        ), text(answer)


def text(walk: Sequence[int]) -> str:
    return " ".join(map(str, walk))


def aggregation_text(pair: Pair, traces: Sequence[str], recipe: Recipe) -> str:
    shown = (
        f"{separator} {trace}" for separator, trace in zip(recipe.separators, traces, strict=True)
    )
    return f"{pair[0]} {pair[1]} {' '.join(shown)}"


# --- the model --------------------------------------------------------------------------------------------------


def make_tokenizer(recipe: Recipe) -> PreTrainedTokenizerFast:
    """One token for each number; words are split at spaces, so that text -> tokens -> text changes nothing."""
    more = [word for word in recipe.separators if word != SEPARATOR]
    words = [
        PAD,
        UNKNOWN,
        END,
        USER,
        ASSISTANT,
        SEPARATOR,
        UNFINISHED,
        *more,
        *map(str, range(MODULUS)),
    ]
    core = Tokenizer(
        WordLevel({word: index for index, word in enumerate(words)}, unk_token=UNKNOWN)
    )
    core.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT],
        clean_up_tokenization_spaces=False,
        model_max_length=128,
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.05,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=MAX_RESPONSE_TOKENS,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return model


def collate(
    tokenizer: PreTrainedTokenizerFast, examples: Sequence[tuple[str, str]]
) -> dict[str, torch.Tensor]:
    """Pad on the right; labels cover the response and its end token."""
    prompts = tokenizer([PROMPT.format(prompt) for prompt, _ in examples], add_special_tokens=False)
    answers = tokenizer([f"{answer} {END}" for _, answer in examples], add_special_tokens=False)
    rows = list(zip(prompts["input_ids"], answers["input_ids"], strict=True))
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    labels = torch.full((len(rows), width), -100)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return {
        "input_ids": ids,
        "labels": labels,
        "attention_mask": (ids != tokenizer.pad_token_id).long(),
    }


def warm_start(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, source: WarmStart
) -> None:
    recipe, started = source.recipe, time.perf_counter()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.01
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.lr, total_steps=recipe.steps, pct_start=0.1
    )
    model.train()
    for step in range(1, recipe.steps + 1):
        parts = (
            collate(tokenizer, [source.search() for _ in range(recipe.search_batch)]),
            collate(tokenizer, [source.aggregation() for _ in range(recipe.aggregation_batch)]),
        )
        losses = [model(**part).loss for part in parts]
        torch.autograd.backward(losses)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == recipe.steps:
            search, aggregation = (loss.item() for loss in losses)
            elapsed = time.perf_counter() - started
            print(f"warm start {step}/{recipe.steps}: loss {search:.3f} search, {aggregation:.3f} "
                  f"aggregation, {elapsed:.0f} s", flush=True)  # fmt: skip
    model.eval()


# --- what the model can do --------------------------------------------------------------------------------------


@torch.no_grad()
def respond(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, contents: Sequence[str]
) -> list[str]:
    """Sample one response to each prompt, at temperature 1."""
    chats = [[{"role": "user", "content": content}] for content in contents]
    batch = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**batch)
    return tokenizer.batch_decode(
        output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True
    )


def score(response: str, pair: Pair) -> bool:
    words = response.split()
    return all(word.isdecimal() for word in words) and solves([int(word) for word in words], pair)


def evaluate(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    pairs: Sequence[Pair],
    recipe: Recipe,
    repeats: int = 2,
) -> dict[str, float]:
    """Measure search (pass@1, pass@4, pass@8) and one aggregation of four traces, also by the number correct."""
    width = 2 * SET_SIZE
    flat = [pair for pair in pairs for _ in range(width * repeats)]
    traces = respond(model, tokenizer, [f"{start} {target}" for start, target in flat])
    right = torch.tensor(
        [score(trace, pair) for trace, pair in zip(traces, flat, strict=True)]
    ).float()
    sets = [traces[first : first + SET_SIZE] for first in range(0, len(traces), SET_SIZE)]
    asked = flat[::SET_SIZE]
    prompts = [
        aggregation_text(pair, group, recipe) for pair, group in zip(asked, sets, strict=True)
    ]
    answers = respond(model, tokenizer, prompts)
    aggregated = torch.tensor(
        [score(answer, pair) for answer, pair in zip(answers, asked, strict=True)]
    ).float()
    members = right.view(-1, SET_SIZE).sum(1)
    return {
        "search_pass@1": right.mean().item(),
        "search_pass@4": right.view(-1, SET_SIZE).amax(1).mean().item(),
        "search_pass@8": right.view(-1, width).amax(1).mean().item(),
        "aggregation": aggregated.mean().item(),
        **{
            f"aggregation_of_{c}_right": aggregated[members == c].mean().item()
            for c in range(SET_SIZE + 1)
        },
    }


def random_walk_accuracy(
    rng: random.Random, pairs: Sequence[Pair], recipe: Recipe, repeats: int = 200
) -> float:
    """Return the accuracy of random walks that are legal and in the right format."""
    hits = [
        solves(random_walk(rng, pair[0], recipe.nearest), pair)
        for pair in pairs
        for _ in range(repeats)
    ]
    return sum(hits) / len(hits)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("configs/demo"), help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of data and weights")
    parser.add_argument("--steps", type=int, default=Recipe.steps, help="updates of the warm start")
    parser.add_argument(
        "--copying", action="store_true", help="the second start of docs/results/reproduction.md"
    )
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    arguments = parser.parse_args()

    recipe = replace(COPYING if arguments.copying else Recipe(), steps=arguments.steps)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    rng = random.Random(arguments.seed)
    arguments.out.mkdir(parents=True, exist_ok=True)

    train, held_out = make_problems(rng, recipe.nearest, recipe.farthest)
    write_problems(arguments.out / "train.jsonl", train)
    write_problems(arguments.out / "heldout.jsonl", held_out)
    print(f"{len(train)} training problems, {len(held_out)} held out")

    tokenizer = make_tokenizer(recipe)
    model = make_model(tokenizer)
    print(f"model of {model.num_parameters():,} parameters, {len(tokenizer)} tokens")
    warm_start(model, tokenizer, WarmStart(recipe, train, held_out, rng))

    folder = arguments.out / "model"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"random walks on held-out problems: {random_walk_accuracy(rng, held_out, recipe):.3f}")
    for name, value in evaluate(model, tokenizer, held_out, recipe).items():
        print(f"warm-started model, held-out {name}: {value:.3f}")


if __name__ == "__main__":
    main()
