"""Optimizers and learning-rate schedules.

optimizers:     optimizers by name, including SGD and LARS, and the schedule as a Keras object
schedules:      scaling, warm-up and decay: the learning rate as a pure function of the global step
step:           the training step of a model on all ranks, each with a state of its own
summed_step:    the step on ranks that share all state: parts, sums, one update
sums:           how gradients, statistics, counters and metrics of all parts of a batch are added up
virtual_ranks:  sums with the same bits on any number of ranks
metric_results: results of metrics, and which logs of a step they are
uneven:         losses and metrics of a whole batch, from ranks with different numbers of rows, masks or weights
kept_gradients: gradients of a part, kept in place of an update
"""
