"""ringtrain prove: puts a job to the test, in short runs on one process and on several ranks.

cli:      the runs, and the certificate as a table, page and JSON
checks:   what the runs show, and the likely reason where something does not hold
rows:     a callback that records the samples of every step
seeded:   starts a script with a seed
"""
