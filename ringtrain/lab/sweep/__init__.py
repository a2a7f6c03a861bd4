"""`ringtrain sweep`: trains with many values of some options.

cli:      the command; the best as TOML
runner:   runs trials in parallel, each on its own slots
trials:   what a trial trains: a configuration, or a script
space:    the file of values and ranges
study:    what to try next, in Optuna's storage
progress: what is printed
ensemble: averaged prediction of the best models
"""
