"""The same training by other means than ringtrain's trainer: functions from a Training to a Trained.

one_start:         one start of a peer on its ranks
training:          what a baseline receives: model, samples, number of steps
by_fit:            Keras' fit: one process, or under a tf.distribute strategy
by_hand:           Horovod's tape in a loop written by hand
synchronous:       MirroredStrategy, MultiWorkerMirroredStrategy
parameter_servers: ParameterServerStrategy, asynchronous
torch_ddp:         PyTorch's DistributedDataParallel over Gloo
"""
