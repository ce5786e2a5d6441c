"""Who is in a run and which steps count, decided by two state machines without sockets, torch or clocks.

Every node has an `Agent`, the run has one `Coordinator`. Neither relies on a message: an agent repeats its whole
`Status`, the coordinator its whole `Order`, until the other side has moved on. Both may be lost, doubled or overtaken.
"""
