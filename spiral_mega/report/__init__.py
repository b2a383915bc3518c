"""What a run looks like afterwards: curves and tables, made from its metrics.jsonl."""

from spiral_mega.report.curves import plot_curves
from spiral_mega.report.summary import summarise
from spiral_mega.report.table import before_after_table
from spiral_mega.telemetry.metrics_file import read_metrics

__all__ = ["before_after_table", "plot_curves", "read_metrics", "summarise"]
