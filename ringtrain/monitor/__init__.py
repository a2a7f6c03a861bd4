"""Monitoring of ranks during training: journal, heartbeat and fault injection.

journal:         events of each rank, one per line, kept over restarts
goodput:         where the time of a run went, over all of its starts, by its journals
heartbeat:       monitor of a rank, in runs and scripts: position each second, reports of stalls and stragglers
diagnosis:       which rank hangs, for how long, and how it is named
stragglers:      its rule for ranks whose part of a step takes longer than the others'
fault_injection: injected faults, to test how a job handles them
"""
