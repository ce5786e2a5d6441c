"""A worker of a resilient run: generation after generation, a trainer with the state of the one before."""
