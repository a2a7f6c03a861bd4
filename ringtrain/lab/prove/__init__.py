"""ringtrain prove: puts a job to the test, in short runs on one process and on several ranks.

cli:      the runs, and the certificate as a table, page and JSON
kinds:    the job, and how each of its starts differs
checks:   what the runs show, and the likely reason where something does not hold
outcomes: weights, metrics and samples of a run, for the checks
rows:     a callback that records the samples of every step
seeded:   starts a script with a seed
"""
