"""Measuring and proving training.

commands:        the commands of the lab, from init to data
ranks:           calls a function on ranks and returns its result
script:          a script with `ringtrain.fit` as the job of a command, and its runs
stats:           medians and ranges of measurements, as JSON
tables:          a table for the terminal; page has it as HTML
init:            ringtrain init
first_job:       the job file that it writes
bench_train:     ringtrain bench train
bench_allreduce: ringtrain bench allreduce
prove:           ringtrain prove: the runs
prove_checks:    what the runs show, and the likely reason where something does not hold
prove_rows:      a callback that records the samples of every step
prove_seeded:    starts a script with a seed
sweep:           ringtrain sweep
sweep_space:     what it tries, and what Optuna keeps
sweep_trials:    the trials on their slots
runs:            ringtrain runs; reads a run's folder, also of a killed run
postmortem:      exit causes, by all ranks' journals
report:          what is on the page of ringtrain report
page:            its HTML: tables and charts in one file
"""
