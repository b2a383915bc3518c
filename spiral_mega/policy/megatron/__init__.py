"""The policy on megatron-core: tensor, sequence, pipeline and expert parallelism, with the distributed optimizer."""
