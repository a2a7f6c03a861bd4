"""ringtrain sweep: trains with many values of some options, and shows which are best.

cli:    the command, what it prints, and the averaged prediction of the best models
space:  the values of each option that is tried, and Optuna's study of the trials
trials: what is trained, and trials that run side by side
"""
