# The two commands of the README: `make train` and `make test`. Both install what they need.

VENV ?= .venv
BIN := $(VENV)/bin
RANKS ?= 2
# One thread a rank: more only make the ranks fight over the cores.
TORCHRUN := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/torchrun --standalone --nproc-per-node $(RANKS) -m spiral_mega
# Two files at a time; the tests of one share what it prepares.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

.PHONY: install browser train train-real reproduce test test-fast lint demo-model clean

install:
	@tools/install_cpu.sh

## Chromium, in which the tests click through the report.
browser:
	@tools/install_browser.sh

## The main job: a small model learns by SPIRAL on 2 ranks. ARGS adds overrides: make train ARGS="run.seed=1"
train: install
	$(TORCHRUN) train configs/demo.yaml $(ARGS)

## SmolLM2-135M-Instruct with LoRA on GSM8K.
train-real: install
	$(BIN)/python tools/prepare_smollm2.py
	HF_HUB_OFFLINE=1 $(TORCHRUN) train configs/smollm2_gsm8k.yaml $(ARGS)

## SPIRAL against GRPO and others, several seeds (docs/results/reproduction.md); goes on where it was cut.
reproduce: install
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m spiral_mega.reproduction $(ARGS)

## Everything that CI runs.
test: install browser lint
	$(PYTEST) $(ARGS)

## Without the cases that run the whole trainer.
test-fast: install browser lint
	$(PYTEST) -m "not slow" $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

## Build the demo's data, tokenizer and warm-started model anew (they are committed).
demo-model: install
	OMP_NUM_THREADS=1 $(BIN)/python tools/build_demo_model.py --out configs/demo

clean:
	rm -rf runs .pytest_cache .mypy_cache .ruff_cache
