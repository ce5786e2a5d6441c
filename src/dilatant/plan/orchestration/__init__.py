"""DistTrain's search: replicas, tensor-parallel and pipeline degree of every module."""
