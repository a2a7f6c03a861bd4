"""A model over several devices of a rank.

stages: consecutive layers on each device, with micro-batches
"""
