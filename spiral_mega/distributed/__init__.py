"""Process group: collectives for bookkeeping, the runtime that chooses the device, gathering of row-sharded tensors."""
