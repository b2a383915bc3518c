"""Python logging in a run of many ranks."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import TextIO

PACKAGE = "spiral_mega"
_handlers: list[logging.Handler] = []
_warned: Counter[tuple[str, str]] = Counter()


class _TerminalHandler(logging.StreamHandler[TextIO]):
    """Writes to the current sys.stderr, which a progress bar may have replaced."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def setup_logging(rank: int, run_dir: str | Path) -> Path:
    """Send this process's logs to the terminal and to run_dir/logs/rank<rank>.log; return the path
    of the file.

    The file gets INFO of this package and WARNING of all others, and is appended to on resume. The
    terminal gets the same from rank 0 and only WARNING from other ranks. Python warnings and
    uncaught exceptions are logged too. A second call replaces the first setup. Raises OSError when
    the file cannot be opened.
    """
    path = Path(run_dir) / "logs" / f"rank{rank}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    terminal = _TerminalHandler()
    terminal.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    root = logging.getLogger()
    for old in _handlers:
        root.removeHandler(old)
        old.close()
    _handlers[:] = [terminal, logging.FileHandler(path, encoding="utf-8")]
    for handler in _handlers:
        handler.setFormatter(
            logging.Formatter(f"%(asctime)s %(levelname)s [rank {rank}] %(name)s: %(message)s")
        )
        root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger(PACKAGE).setLevel(logging.INFO)
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    return path


def warn_once(logger: logging.Logger, message: str, *args: object) -> None:
    """Log `message` (before formatting) the first time, and with a count the 10th, 100th, ... time."""
    _warned[logger.name, message] += 1
    times = _warned[logger.name, message]
    if times == 1:
        logger.warning(message, *args, stacklevel=2)
    elif str(times).strip("0") == "1":
        logger.warning(message + " (%d times so far)", *args, times, stacklevel=2)


def _log_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    logging.getLogger(PACKAGE).critical("uncaught %s", kind.__name__, exc_info=(kind, error, trace))
