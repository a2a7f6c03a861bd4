"""Optimizers and learning-rate schedules.

optimizers:    optimizers by name, including SGD and LARS, and the schedule as a Keras object
schedules:     scaling, warm-up and decay: the learning rate as a pure function of the global step
step:          the training step of a model on all ranks: parts, sums, one update
uneven:        losses and metrics of a whole batch, from ranks with different numbers of rows, masks or weights
own_step:      what a model's own train_step does besides its update
virtual_ranks: sums with the same bits on any number of ranks
divided:       whether a step gives the same for a batch as for its parts together
"""
