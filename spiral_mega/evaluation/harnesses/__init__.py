"""Test-time harnesses, one a file."""
