"""`ringtrain bench`: each bench as the launching process sees it, and its part on ranks.

train:               images/s at several numbers of ranks: tables and plots
train_on_ranks:      images/s, the parts of a step, ring efficiency, gradients' profile
allreduce:           allreduce bandwidth: tables and plots
allreduce_on_ranks:  MPI's, Horovod's and NumPy's allreduce, a memory copy, the link
peers:               the same training by ringtrain and by its alternatives, in turns
peers_on_ranks:      one training of it
baselines:           the alternatives
startup:             from the command to the first step, by stages
checkpoint_on_ranks: how long training waits for a save
input_on_ranks:      samples/s of the input pipeline
on_ranks_alone:      shows what a bench without an outer part measured
"""
