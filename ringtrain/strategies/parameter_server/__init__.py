"""Parameter servers: ps-sync and ps-async.

coordinator:  rank 0: base class of both strategies, schedules steps and counts them
asynchronous: ps-async
synchronous:  ps-sync
cluster:      roles of the ranks, their addresses and messages
worker:       the rank of a server or worker: starts its process, restarts a dead worker
server:       that process: TensorFlow's server, and a worker's samples
"""
