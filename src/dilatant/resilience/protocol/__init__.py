"""Recovery protocol: two state machines, without sockets, torch or clocks, decide membership and commit steps.

Every node has an `Agent`, the run has one `Coordinator`. Neither relies on any one message, which may be lost, doubled
or reordered: an agent repeats its `Status`, the coordinator its `Order`, until the other side has advanced.
"""
