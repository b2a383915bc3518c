import os
import pty
import re
import subprocess
import sys
from pathlib import Path

RUN = """
import logging, sys
from spiral_mega.config.schema import TelemetryConfig
from spiral_mega.telemetry import Telemetry, setup_logging
setup_logging(0, sys.argv[1])
with Telemetry(sys.argv[1], TelemetryConfig(), 20, "a-run", {}) as telemetry:
    for step in range(1, 13):
        telemetry.log(step, {"reward/search": 0.25, "reward/aggregation": 0.5, "length/search": 812.0,
                             "optim/grad_norm": float("nan"), "optim/lr": 2e-5})
    logging.getLogger("spiral_mega.loop").warning("a warning while the bar is up")
    telemetry.log(12, {"eval/search_accuracy": 0.3125})
"""


def on_a_terminal(run_dir: Path) -> str:
    """Return what the run writes to a terminal of 100 columns."""
    parent, child = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    command = [sys.executable, "-c", RUN, str(run_dir)]
    process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, env=environment)
    os.close(child)
    output = b""
    while True:
        try:
            read = os.read(parent, 65536)
        except OSError:  # Linux's error when the other side is closed
            break
        if not read:
            break
        output += read
    os.close(parent)
    assert process.wait() == 0, output.decode()
    return output.decode()


def test_a_terminal_shows_a_bar_the_newest_metrics_and_whole_log_lines(tmp_path: Path) -> None:
    output = on_a_terminal(tmp_path)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output)
    assert "a-run" in text
    assert "12/20" in text
    assert "━" in text
    assert re.search(r"search +0\.25 +812", text)
    assert re.search(r"aggregation +0\.5", text)
    assert "31.2%" in text
    assert re.search(r"WARNING \[rank 0\] spiral_mega\.loop: a warning while the bar is up", text)
    assert output.count("\x1b[?25l") == output.count("\x1b[?25h"), "the cursor is left as it was"


def test_without_a_terminal_each_record_is_one_plain_line(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUN, str(tmp_path)]
    output = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [line for line in output.stderr.splitlines() if line.startswith("step=")]
    assert output.stdout == ""
    assert "\x1b" not in output.stderr
    assert len(lines) == 13
    assert re.fullmatch(
        r"step=12/20 reward/search=0\.25 reward/aggregation=0\.5 length/search=812 optim/grad_norm=nan eta=0:00:00",
        lines[11],
    )
    assert re.fullmatch(r"step=12/20 eval/search_accuracy=31\.2% eta=\S+", lines[12])


def test_a_closed_pipe_does_not_stop_the_run(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUN, str(tmp_path)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    assert process.stderr is not None
    process.stderr.close()
    process.wait()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 13
    assert "progress is no longer shown" in (tmp_path / "logs" / "rank0.log").read_text()
