"""One training run: set-up, callbacks, saves, resume and terminal output.

setup:          names, data and compiled model, from a Config
context:        the run on this rank, and its job
consistency:    agreement of all ranks: code, options, data
run_files:      the folder of a run on rank 0: lock, mirror, logs
clock:          the position of a run, and why it is about to end
identity:       what all runs of one name have in common, in words
loop:           the training loop of all strategies
callbacks:      the ordered list of a run's callbacks
devices:        one GPU per local rank, memory limits, CPU threads
saver:          saves the state of a run during training
resume:         where a run starts, and its state, from the newest checkpoint
evaluation:     metrics over all ranks, equal to those of one process
step_monitor:   phases and heartbeats of the steps
stopping:       ends a run on all ranks after the same step: signals, time limit, callbacks, NaN
tracking:       metrics files, TensorBoard, results
console:        plan, progress and result in the terminal
log_capture:    writes standard error to the rank's log, and to the terminal without TensorFlow's messages
"""
