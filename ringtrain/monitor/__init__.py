"""Monitoring of ranks during training: journal, heartbeat, timeline, and fault injection.

journal:         events of each rank, one per line, kept over restarts
heartbeat:       step and phase of every rank each second, and reports of stalls and stragglers
diagnosis:       blocking ranks and stragglers, found by pure functions
fault_injection: injected faults, to test how a job handles them
timeline:        timeline of each rank, step by step, with its clock offset to rank 0
trace:           timelines of all ranks in one file for Perfetto
trackers:        records of a run in MLflow and Weights & Biases
"""
