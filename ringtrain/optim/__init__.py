"""Optimizers and learning-rate schedules.

optimizers: optimizers by name, including SGD and LARS, and the schedule as a Keras object
schedules:  scaling, warm-up and decay: the learning rate as a pure function of the global step
"""
