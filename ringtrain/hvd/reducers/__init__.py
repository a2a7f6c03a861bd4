"""Ways to reduce gradients besides Horovod's allreduce, a module each with its settings, checks and state.

bfloat16:    sums of 16-bit numbers
powersgd:    low-rank approximations of gradients, with error feedback
local_steps: rounds of steps without communication, and an outer optimizer between them

The first two are a `reducer.Reducer` of dense gradients, which `compression` names; the last is a subclass of
`distributed.Distributed`, an update, which `optimizer` chooses.
"""
