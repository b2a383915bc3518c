"""SPIRAL at scale: train a language model to search in parallel and to aggregate what it found."""

__version__ = "0.1.0"
