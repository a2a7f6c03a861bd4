"""`ringtrain bench`: one file per bench; `main` launches and shows results, `on_ranks` measures.

train:      images/s at several numbers of ranks, the parts of a step, ring efficiency, gradients' profile
allreduce:  MPI's, Horovod's and NumPy's allreduce, a memory copy, the link
peers:      the same training by ringtrain and by its alternatives in benchmarks/peers, alternately
startup:    from the command to the first step, by stages
checkpoint: how long training waits for a save
input:      samples/s of the input pipeline
"""
