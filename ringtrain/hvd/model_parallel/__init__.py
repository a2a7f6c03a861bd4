"""A model over several devices of a rank.

stages:  consecutive layers on each device, and micro-batches
columns: kernels in parts on the devices
"""
