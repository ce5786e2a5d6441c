"""Communication between ranks: launch, rendezvous, process groups, abort, deadlines; wraps torch.distributed."""
