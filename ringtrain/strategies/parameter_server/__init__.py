"""Parameter servers: ps-sync and ps-async.

coordinator:  the chief: holds the model, hands out steps
asynchronous: ps-async
synchronous:  ps-sync
cluster:     which rank is chief, server or worker, their addresses and messages
listening:   keeps other hosts from TensorFlow's gRPC servers
worker:      a server's or worker's rank: starts its process, and restarts a dead worker
server:      that process: TensorFlow's server, and a worker's samples
"""
