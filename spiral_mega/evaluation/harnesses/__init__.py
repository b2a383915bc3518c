"""Test-time harnesses, one a file: its section of the configuration, its sampling plan, and its measures."""
