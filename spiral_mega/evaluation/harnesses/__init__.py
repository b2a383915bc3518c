"""Test-time harnesses, one a file: its configuration section, sampling plan and measures."""
