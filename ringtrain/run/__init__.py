"""One training run: set-up, callbacks, checkpoints, resume and terminal output.

setup:          model, data, callbacks and the run folder, from a Config
consistency:    verifies that code, versions and data are the same on all ranks
devices:        one GPU per local rank, memory limits, CPU threads
checkpoint:     atomic checkpoints with a checksum per file; export of the trained model
saver:          saves the state of a run during training
model_state:    state of a model as arrays, shared and per rank
resume:         finds the checkpoint to resume from and restores it on all ranks
evaluation:     metrics over all ranks, equal to those of one process
early_stopping: early stopping, and a lower learning rate on a plateau
stopping:       ends a run on all ranks after the same step: signals, time limit, NaN
run_folder:     the run folder: name, lock, summary.json
tracking:       metrics files, TensorBoard, curves
console:        plan, progress bar and result in the terminal
log_capture:    writes standard error to the rank's log, and to the terminal without TensorFlow's messages
lazy_keras:     defers the import of Keras modules that training does not use
"""
