"""`spiral-mega doctor`: check a machine, and a run on it; each finding names the remedy."""

from spiral_mega.doctor.diagnose import diagnose
from spiral_mega.doctor.finding import Finding, format_report

__all__ = ["Finding", "diagnose", "format_report"]
