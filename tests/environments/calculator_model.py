"""A tiny real model that was taught, by a few conversations, to call the calculator and to repeat what it says.

In its lessons the tool's replies are random numbers, so that it cannot know an answer without asking.
"""

import random
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import GenerationConfig, PreTrainedTokenizerFast

from tests.support.tiny_models import tiny_model

SPECIAL = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|unknown|>"]
WORDS = [*SPECIAL, "<calc>", "</calc>", "+", *map(str, range(41))]
END_ID = 1
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|> {{ message.content }} "
    "{% if message.role == 'assistant' %}<|end|> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    model = WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<|unknown|>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        unk_token="<|unknown|>",
        additional_special_tokens=SPECIAL[2:5],
        chat_template=TEMPLATE,
    )


def lesson(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> tuple[list[int], list[bool]]:
    """A conversation's tokens, and which of them are the model's."""
    a, b, reply = rng.randint(1, 20), rng.randint(1, 20), rng.randint(0, 40)
    ids, mine = [], []
    for text, own in [
        (f"<|user|> {a} + {b} <|assistant|>", False),
        (f"<calc> {a} + {b} </calc> <|end|>", True),
        (f"<|tool|> {reply} <|assistant|>", False),
        (f"{reply} <|end|>", True),
    ]:
        part = tokenizer.encode(text, add_special_tokens=False)
        ids += part
        mine += [own] * len(part)
    return ids, mine


def save_calculator_model(folder: Path, steps: int) -> Path:
    """Teach for so many steps, and write model and tokenizer to `folder`."""
    tokenizer, rng = make_tokenizer(), random.Random(0)
    model = tiny_model("qwen3", tied=False, vocab_size=len(WORDS), initializer_range=0.05).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    for _ in range(steps):
        lessons = [lesson(tokenizer, rng) for _ in range(64)]
        ids = torch.tensor([each for each, _ in lessons])  # all of one length
        mine = torch.tensor([each for _, each in lessons])
        logits = model(input_ids=ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits[mine[:, 1:]], ids[:, 1:][mine[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    GenerationConfig(eos_token_id=[END_ID], pad_token_id=0, do_sample=True).save_pretrained(folder)
    return folder
