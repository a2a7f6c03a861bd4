"""One training run: setup, callbacks, checkpoints, resume, and what a user sees of it.

setup:          model, data, callbacks and the run folder, from a Config
consistency:    code, versions and data are the same on all ranks, or the run is refused
devices:        one GPU per local rank, memory limits, CPU threads
checkpoint:     atomic checkpoints with a checksum per file; the exported model
saver:          saves a run's state during training
model_state:    a model's state as arrays: shared, and per rank
resume:         which checkpoint a run resumes from; restores it on all ranks together
evaluation:     metrics over all ranks, equal to those of one process
early_stopping: early stopping, and a lower learning rate on a plateau
stopping:       signals, time limit and NaN end a run on all ranks after the same step
run_folder:     the run folder: name, lock, summary.json
tracking:       metrics, TensorBoard, curves
console:        plan, progress bar and result in the terminal
log_capture:    TensorFlow's messages to the rank's log, everything else to the terminal
lazy_keras:     loads the parts of Keras that training does not use on first use
"""
