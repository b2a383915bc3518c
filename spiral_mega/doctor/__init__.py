"""What is wrong with this machine, or with a run on it, before the run: each check says what to do about it."""

from spiral_mega.doctor.diagnose import diagnose, show
from spiral_mega.doctor.finding import Finding

__all__ = ["Finding", "diagnose", "show"]
