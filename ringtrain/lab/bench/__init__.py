"""`ringtrain bench`: one file per bench; `main` launches and shows results, `on_ranks` measures.

The first line of a file is the bench's name and help: a new file here is a new bench.
"""
