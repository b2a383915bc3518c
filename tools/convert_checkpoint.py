"""Run `spiral-mega convert` from a checkout without an installation.

python tools/convert_checkpoint.py ORIGIN TARGET --to hf
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from spiral_mega.cli import app

if __name__ == "__main__":
    app(["convert", *sys.argv[1:]])
