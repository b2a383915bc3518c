"""From weighted traces to micro-batches: token trees, their balance over ranks, and attention along
their paths.

    TrainingSequence -> distribute -> micro-batches -> pack -> TreeBatch -> tree_attention, linear_logprob

Suffixes of tensor names give their dimensions, in order:

    T   rows: the distinct tokens of a micro-batch's trees       H   heads: Hq of queries, Hkv of keys and values
    U   distinct response tokens, each predicted once            D   features of a head
    R   response tokens, sequence by sequence                    B   blocks of one size
    Q   rows that attend (T, or a rank's share of them)          Lq, Lk   queries and keys of a block
"""
