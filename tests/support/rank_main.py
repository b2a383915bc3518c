"""What torchrun starts as a rank, for tests.support.ranks."""

import importlib
import sys
from pathlib import Path

from spiral_mega.ending import without_teardown
from spiral_mega.imports import quick_imports


def main(function: str, folder: Path) -> None:
    module, _, name = function.partition(":")
    with quick_imports():
        import torch

        from spiral_mega.runtime import start_runtime

        call = getattr(importlib.import_module(module), name)
    argument = torch.load(folder / "argument.pt", weights_only=False)
    with start_runtime(timeout_minutes=5.0) as runtime:
        result = call(runtime, argument)
        torch.save(result, folder / f"result{runtime.rank}.pt")


if __name__ == "__main__":
    with without_teardown():
        main(sys.argv[1], Path(sys.argv[2]))
