"""`ringtrain forecast`: images/s at any number of ranks.

cli:      the command: tables, JSON, a plot
formulas: the step, event by event; what reaches an efficiency: pure functions
memory:   bytes of a model on each device, from the graph of a step
network:  time of an allreduce over hosts and links
profile:  one process' step: compute time, and when each gradient is ready
points:   what to predict, and measured points beside it
"""
