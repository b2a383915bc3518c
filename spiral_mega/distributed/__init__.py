"""The process group: collectives, background collectives, the runtime (device, backend), gathering of row shards."""
