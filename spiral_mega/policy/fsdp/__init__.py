"""The policy on FSDP2."""
