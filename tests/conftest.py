"""For every test: the repository importable as `tests.*`, one thread a process, and no model hub."""

import os
import sys
from pathlib import Path

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

settings.register_profile("untimed", deadline=None)  # a loaded machine fails no test
settings.load_profile("untimed")
