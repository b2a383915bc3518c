"""Conversion of models, a block of rows at a time: Hugging Face, FSDP2's distributed checkpoints, PEFT adapters."""

from spiral_mega.conversion.convert import DTYPES, FORMS, convert

__all__ = ["DTYPES", "FORMS", "convert"]
