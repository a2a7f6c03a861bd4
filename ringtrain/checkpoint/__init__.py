"""What a run leaves on disk, and what it takes from there to go on. It knows no run.

checkpoint:     atomic checkpoints with a checksum per file; export of the trained model
model_state:    state of a model as arrays, shared and per rank
callback_state: what callbacks keep, saved and restored
run_folder:     the run folder: name, lock, summary.json
mirror:         copies a run to another file system or a bucket, and back
durable:        files and folders that outlive a loss of power
"""
