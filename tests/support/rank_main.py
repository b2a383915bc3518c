"""The main module of a rank that tests.support.ranks starts with torchrun."""

import importlib
import sys
from pathlib import Path

from spiral_mega.process.exit import skip_teardown
from spiral_mega.process.imports import imports_without_gc


def main(function: str, folder: Path) -> None:
    module, _, name = function.partition(":")
    with imports_without_gc():
        import torch

        from spiral_mega.distributed.runtime import start_runtime

        call = getattr(importlib.import_module(module), name)
    argument = torch.load(folder / "argument.pt", weights_only=False)
    with start_runtime(timeout_minutes=5.0) as runtime:
        result = call(runtime, argument)
        torch.save(result, folder / f"result{runtime.rank}.pt")


if __name__ == "__main__":
    with skip_teardown():
        main(sys.argv[1], Path(sys.argv[2]))
