"""The policy on FSDP2: a transformers model sharded over all ranks, its head, its optimizer and its weights."""
