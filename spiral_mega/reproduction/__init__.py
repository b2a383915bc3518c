"""The paper's comparison in small: SPIRAL against GRPO and others from one start (docs/results/reproduction.md).

`runs` trains and evaluates, `findings` compares what was measured, `figures` and `tables` show it.
"""
