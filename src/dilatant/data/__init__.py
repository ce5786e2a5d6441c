"""The data room: readers, encoding, the sizes index, samplers and batches, from records on disk to model inputs."""
