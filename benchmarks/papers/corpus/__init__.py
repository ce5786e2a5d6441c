"""A corpus of measured runs, and predictions of them."""
