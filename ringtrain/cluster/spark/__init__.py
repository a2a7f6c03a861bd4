"""Ranks on Spark's executors, and a function run once per combination of its arguments (`launch`).

session:        a session, or one line that says why there is none
function_sweep: launch: a function run once per combination of its arguments
function_run:   one such run, in a process on an executor
plan:           the command that starts a job on executors
driver:         that command: a task per rank, their output, signals and ends
placement:      which task becomes which rank
task:           a task: runs a rank, talks to the driver
rendezvous:     where Gloo's ranks find each other
dataframe:      rows of a DataFrame, dealt out over ranks
"""

from ringtrain.cluster.spark.function_sweep import Row, launch
from ringtrain.cluster.spark.session import start

__all__ = ["Row", "launch", "start"]
