import subprocess
import sys
from pathlib import Path

RUN = """
import logging, sys, warnings
from spiral_mega.telemetry import setup_logging, warn_once
rank = int(sys.argv[1])
setup_logging(rank, sys.argv[2])
setup_logging(rank, sys.argv[2])
log = logging.getLogger("spiral_mega.loop")
log.info("an info")
logging.getLogger("some.library").info("chatter")
for number in range(150):
    warn_once(log, "problem %d was truncated", number)
warnings.warn("a python warning")
raise RuntimeError("the end of it")
"""


def run(rank: int, run_dir: Path) -> tuple[str, str]:
    """What `rank` shows on the terminal, and what its file holds."""
    command = [sys.executable, "-c", RUN, str(rank), str(run_dir)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 1
    return process.stderr, (run_dir / "logs" / f"rank{rank}.log").read_text()


def test_every_rank_has_its_file_and_only_rank_0_logs_info_to_the_terminal(tmp_path: Path) -> None:
    terminals, files = zip(*(run(rank, tmp_path) for rank in (0, 1)), strict=True)
    assert [text.count("an info") for text in terminals] == [1, 0]
    assert [text.count("an info") for text in files] == [1, 1]
    for rank, text in enumerate([*terminals, *files]):
        assert f"WARNING [rank {rank % 2}] spiral_mega.loop: problem 0 was truncated" in text
        assert "a python warning" in text
        assert "chatter" not in text


def test_a_warning_that_repeats_is_counted_not_repeated(tmp_path: Path) -> None:
    _, file = run(0, tmp_path)
    truncated = [
        line.split("loop: ")[1]
        for line in file.splitlines()
        if "was truncated" in line and "WARNING" in line
    ]
    assert truncated == [
        "problem 0 was truncated",
        "problem 9 was truncated (10 times so far)",
        "problem 99 was truncated (100 times so far)",
    ]


def test_the_traceback_of_a_rank_that_died_is_in_its_file(tmp_path: Path) -> None:
    terminal, file = run(1, tmp_path)
    for text in (terminal, file):
        assert text.count("RuntimeError: the end of it") == 1
        assert "[rank 1]" in text


def test_a_resumed_run_appends_to_the_file(tmp_path: Path) -> None:
    run(0, tmp_path)
    assert run(0, tmp_path)[1].count("an info") == 2
