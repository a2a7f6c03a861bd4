"""`ringtrain tune`: settings that make a training faster, measured.

cli:        the search within its budget, and the TOML it writes
candidates: what is tried, in which order, and what is kept
measure:    on ranks: images/s with settings that one start can have
"""
