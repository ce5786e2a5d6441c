"""Recovery protocol: two state machines, without sockets, torch or clocks, decide membership and commit steps.

Every node has an `Agent`, the run has one `Coordinator`. Messages may be lost, duplicated or reordered: an agent
repeats its `Status`, and the coordinator its `Order`, until the other side has advanced.
"""
