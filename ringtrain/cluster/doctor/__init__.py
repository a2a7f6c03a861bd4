"""`ringtrain doctor`: checks hosts and the links between them before a job starts.

preflight: probes every host, measures the ring, prints the findings
probe:     collects the facts of one host; sent to it as source, standard library only
checks:    the checks, one table column each: from facts to cells
findings:  cells and findings, with the commands that fix them
links:     results of the ring measurement: each link, an allreduce, the slowest link
report:    prints the report as a table or as JSON
"""
