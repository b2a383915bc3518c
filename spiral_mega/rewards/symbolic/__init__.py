"""Mathematical answers in LaTeX, read once into small typed values and compared exactly.

    text --tokens--> tokens --groups--> brackets --reader--> answers --compare--> the same?
                                 expressions parses each value; equality and separation decide between two
"""
