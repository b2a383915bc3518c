"""`spiral-mega doctor`: check this machine, and a run on it, before the run; each finding names the remedy."""

from spiral_mega.doctor.diagnose import diagnose
from spiral_mega.doctor.finding import Finding, format_report

__all__ = ["Finding", "diagnose", "format_report"]
