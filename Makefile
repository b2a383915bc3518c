# The main targets are `make train` and `make test`. Both install what they need.

VENV ?= .venv
BIN := $(VENV)/bin
RANKS ?= 2
# One thread for each rank: with more, the ranks compete for the cores.
TORCHRUN := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/torchrun --standalone --nproc-per-node $(RANKS) -m spiral_mega
# Two test files at a time; the tests of a file share its fixtures.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

.PHONY: install browser train train-real reproduce test test-fast lint reference demo-model clean

install:
	@tools/install_cpu.sh

## Install Chromium, with which the tests use the report page.
browser:
	@tools/install_browser.sh

## Train a small model with SPIRAL on 2 ranks. ARGS adds overrides: make train ARGS="run.seed=1"
train: install
	$(TORCHRUN) train configs/demo.yaml $(ARGS)

## Train SmolLM2-135M-Instruct with LoRA on GSM8K.
train-real: install
	$(BIN)/python tools/prepare_smollm2.py
	HF_HUB_OFFLINE=1 $(TORCHRUN) train configs/smollm2_gsm8k.yaml $(ARGS)

## Compare SPIRAL with GRPO and others over several seeds (docs/results/reproduction.md); resumes where it was interrupted.
reproduce: install
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m spiral_mega.reproduction $(ARGS)

## Run everything that CI runs.
test: install browser lint
	$(PYTEST) $(ARGS)

## Run all but the tests of the whole trainer.
test-fast: install browser lint
	$(PYTEST) -m "not slow" $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

## Write docs/reference/ from the code.
reference: install
	$(BIN)/python -m tools.write_reference

## Rebuild the demo's data, tokenizer and warm-started model, which are committed.
demo-model: install
	OMP_NUM_THREADS=1 $(BIN)/python tools/build_demo_model.py --out configs/demo

clean:
	rm -rf runs .pytest_cache .mypy_cache .ruff_cache
