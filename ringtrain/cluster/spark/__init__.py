"""Ranks on Spark's executors, and a function run once per combination of its arguments (`launch`).

session:        starts a Spark session, or explains in one line why it cannot
function_sweep: launch: a function run once per combination of its arguments
function_run:   one such run, in a process on an executor
plan:           the command that starts a job on executors
driver:         that command: starts a task per rank, assigns ranks, forwards output and signals, collects exit codes
task:           a task: runs a rank and forwards its output to the driver
dataframe:      rows of a DataFrame, distributed over ranks
"""

from ringtrain.cluster.spark.function_sweep import Row, launch
from ringtrain.cluster.spark.session import start

__all__ = ["Row", "launch", "start"]
