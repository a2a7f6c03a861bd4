"""One training run: set-up, callbacks, saves, resume and terminal output.

setup:          names, data and compiled model, from a Config
context:        the run on this rank, and its job
consistency:    agreement of all ranks: code, options, data
from_checkpoint: where a run starts, its state restored, and its folder opened
identity:       what all runs of one name have in common, in words
loop:           the training loop of all strategies
callbacks:      the ordered list of a run's callbacks
devices:        one GPU per local rank, memory limits, CPU threads
saver:          saves the state of a run during training
resume:         finds the checkpoint to resume from and restores it on all ranks
evaluation:     metrics over all ranks, equal to those of one process
step_monitor:   phases and heartbeats of the steps
stopping:       ends a run on all ranks after the same step: signals, time limit, callbacks, NaN
tracking:       metrics files, TensorBoard, results
console:        plan, progress and result in the terminal
log_capture:    writes standard error to the rank's log, and to the terminal without TensorFlow's messages
"""
