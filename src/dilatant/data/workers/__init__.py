"""Worker processes that decode samples ahead of training, on this machine or on a Ray cluster."""
