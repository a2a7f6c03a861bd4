"""`ringtrain doctor`: checks hosts and the links between them before a job starts.

preflight: asks every host, measures the ring, prints the findings
probe:     facts of one host; sent to it whole, standard library only
checks:    the columns of the table: from facts to findings
findings:  cells and findings, with the commands that fix them
links:     a measured ring: each link, an allreduce, the slowest link
report:    the table in the terminal, and as JSON
"""
