"""Optimizers and learning-rate schedules.

optimizers:    optimizers by name, including SGD and LARS, and the schedule as a Keras object
schedules:     scaling, warm-up and decay: the learning rate as a pure function of the global step
shared_step:   a step after which all ranks hold the same state, and which a lost rank leaves undone as a whole
divided:       whether a step gives the same for a batch as for its parts together
uneven:        loss and gradient of a whole batch, from ranks with different numbers of rows
virtual_ranks: the same step with the same bits on any number of ranks
"""
