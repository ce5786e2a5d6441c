"""The worker process of a resilient run: in each generation a new trainer with the state of the one before."""
