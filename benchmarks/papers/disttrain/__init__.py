"""DistTrain."""
