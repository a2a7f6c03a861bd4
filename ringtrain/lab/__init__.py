"""Measuring, comparing and predicting training.

commands: options of bench, tune, sweep, compare, predict and report
starts:   starts a part of a bench on ranks and reads its result
ranks:    what such a part begins with on each rank
jobs:     several jobs side by side, each on slots of its own
stats:    medians, spreads and the machine they are from; tables and JSON
plots:    an empty figure, and writing it as PNG
bench:    ringtrain bench
tune:     ringtrain tune
sweep:    ringtrain sweep
compare:  ringtrain compare
predict:  ringtrain predict
report:   ringtrain report
"""
