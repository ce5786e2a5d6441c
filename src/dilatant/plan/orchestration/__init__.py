"""DistTrain's search: replicas, tensor and pipeline degree of every module."""
