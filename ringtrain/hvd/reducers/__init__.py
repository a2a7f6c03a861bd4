"""Ways to reduce gradients besides Horovod's allreduce, a module each with its settings, checks and state.

bfloat16: sums of 16-bit numbers
powersgd: low-rank approximations of gradients, with error feedback

Each is a `reducer.Reducer` of dense gradients, which `compression` names.
"""
