"""Measuring and proving training.

commands:  the commands of the lab, from init to data
ranks:     calls a function on ranks and returns its result; what such functions begin with
script:    a script with `ringtrain.fit` as the job of a command
stats:     medians, spreads and the machine they are from, as JSON
tables:    a table for the terminal
init:      ringtrain init; first_job is the file that it writes
bench_*:   ringtrain bench
prove:     ringtrain prove: the runs; prove_checks: what they show; prove_rows, prove_seeded: on the ranks
sweep:     ringtrain sweep; sweep_space: what it tries, and Optuna; sweep_trials: the trials on their slots
files_*:   ringtrain data
runs:      ringtrain runs, and what a run's folder has
report:    ringtrain report; report_curves: charts and steps; page: HTML; postmortem: the verdict on a run
"""
