"""How ranks talk: launch, groups of one generation, exchange, abort, deadlines; alone knows torch.distributed."""
