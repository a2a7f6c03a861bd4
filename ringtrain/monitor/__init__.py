"""Watching ranks while they train: journal, heartbeat, timeline, and injected faults.

journal:         events of each rank, a line each, kept through all restarts
heartbeat:       every rank reports its step each second; names stalls and stragglers
diagnosis:       which rank keeps the others waiting, and which is slow: pure functions
fault_injection: faults on order, to see how a job handles them
timeline:        each rank's timeline, step by step, with its clock's offset to rank 0
trace:           the timelines of all ranks as one file for Perfetto
"""
