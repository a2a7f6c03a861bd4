"""`ringtrain compare`: the same job under several strategies, in turns.

cli:     runs them
results: their runs as tables, a plot and a page
"""
