"""Measuring and proving training.

commands: the commands of the lab, from init to data
ranks:    calls a function on ranks and returns its result; what such functions begin with
script:   a script with `ringtrain.fit` as the job of a command
stats:    medians, spreads and the machine they are from, as JSON
tables:   a table for terminal and Markdown; report/ has it as HTML
init:     ringtrain init
bench:    ringtrain bench
prove:    ringtrain prove
sweep:    ringtrain sweep
files:    ringtrain data
report:   ringtrain report, ringtrain runs
"""
