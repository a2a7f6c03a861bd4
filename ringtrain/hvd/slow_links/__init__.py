"""Fewer bytes between the ranks: see docs/slow-links.md.

compression: compression of gradients by name, and sums in bfloat16
powersgd:    low-rank approximations of gradients, with error feedback
local_steps: rounds of steps without communication, and an outer optimizer between them
"""
