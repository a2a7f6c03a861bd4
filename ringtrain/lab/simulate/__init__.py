"""`ringtrain simulate`: cost of host failures for a long job, with the launcher's own decisions.

cli:      the command: tables, recommendation, JSON and plot
cases:    variants of a planned job: checkpoint intervals, spare hosts, options of launch
job:      one simulated job, from its start to its last checkpoint
training: clock and steps of a job, divided into parts as goodput is
hosts:    failures of hosts in the order of time, and which hosts are down
costs:    seconds of a step, a save, a start: from options, or from a run's journal
"""
