"""A run on one rank: its job, the training loop and its steps, evaluation, saves and resume, terminal output.

run:            the run on this rank, and its job
configured:     data, model and callbacks of a configuration
script:         those of a script that calls `ringtrain.fit`
script_options: the arguments of `fit` as a configuration
own_fit:        models with a `fit` of their own
script_model:   a compiled model, made ready for several ranks, and afterwards as before
job:            what a configuration and a script have in common
unlike:         what of a model is not the same on several ranks as in one process, in words
agreement:      verifies that all ranks have the same code, options and data
identity:       what all runs of one name have in common, in words
devices:        one GPU per local rank, memory limits, CPU threads
run_files:      the folder of a run on rank 0: lock, mirror, logs
resume:         where a run starts, and its state, from the newest checkpoint
loop:           the training loop of all strategies
clock:          the position of a run, and why it is about to end
callbacks:      the ordered list of a run's callbacks
rows:           each rank's rows of arrays and streams of batches, for ring
step:           one step of ranks that have a state of their own
summed_step:    one step of ranks that share all state
sums:           what is summed over the ranks with the gradients
uneven:         losses and metrics of a whole batch, from ranks with different numbers of rows, masks or weights
virtual_ranks:  the same bits on any number of ranks
metric_results: metrics of a step, as Keras names them
evaluation:     metrics over all ranks, equal to those of one process
held_out:       `ringtrain.evaluate` and `predict`, on a part of the data
saver:          when the state of a run is saved, and what becomes of an error
stopping:       ends a run on all ranks after the same step: signals, time limit, callbacks, NaN
step_monitor:   phases and heartbeats of the steps
tracking:       metrics files, TensorBoard, results
console:        plan, progress and result in the terminal
log_capture:    writes standard error to the rank's log, and to the terminal without TensorFlow's messages
"""
