"""Optimizers and learning-rate schedules.

optimizers: optimizers by name, SGD and LARS among them, and the schedule as Keras takes it
schedules:  scaling, warm-up and decay: the learning rate as a pure function of the global step
"""
