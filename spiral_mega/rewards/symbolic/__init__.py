"""Mathematical answers in LaTeX: read once into small typed values, which are compared exactly.

    text ── characters ──> LaTeX ── tokens (literals) ──> tokens ── groups ──> brackets
                                                                                   │ reader
              expressions <── measures (units, words) <── items, lists, relations <┘
                   │                                              │
                 nodes                                         answers
                   │ equality (evaluate, separation, calculus)    │ compare (quantities, names, realsets)
                   └──────────────── the same? ───────────────────┘

An answer is a value with a unit, a choice, words, a sequence (list, tuple, interval, set), a
relation, an operation on sets, a ratio or a matrix. What fits none of these is Unread: equal only
to what is spelt the same.
"""
