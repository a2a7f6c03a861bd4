"""`ringtrain bench`: `main` launches and shows results, `on_ranks` measures.

train:     images/s, what a step's time goes into, ring efficiency
allreduce: allreduces by MPI, Horovod, NCCL and a ring in NumPy
"""
