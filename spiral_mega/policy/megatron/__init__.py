"""The policy on megatron-core: tensor, sequence, context, pipeline and expert parallelism.

megatron_policy.py      one update; log-probs; weights for engines and exports
parallel_layout.py      process groups, and this rank's place in them
limits.py               refuse models and layouts that do not fit together
transformer_config.py   megatron-core's config of a Hugging Face model
megatron_model.py       this rank's stages, from token trees to log-probs
modules.py              tree attention and RMSNorm in megatron-core's layers
context_parallel.py     rows of a micro-batch on each rank
families.py             Hugging Face tensors of each parameter, and a rank's shards of them
megatron_weights.py     load and stream these shards
megatron_lora.py        adapters on parallel linears
megatron_optimizer.py   distributed AdamW
checkpoint_state.py     its state as rectangles of Hugging Face tensors
"""
