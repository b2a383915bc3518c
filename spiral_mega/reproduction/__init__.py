"""The paper's comparison in small: SPIRAL against GRPO and others from one start.

docs/results/reproduction.md describes it and has its results.

runs             train and evaluate every recipe and seed
findings         compare what was measured with what the paper claims
set_score        what SPIRAL's credit teaches the search, given the aggregator's success
figures          draw the comparison
markdown_report  write it as Markdown tables
"""
