"""Media units: how many tokens an encoder makes of a medium, and the tensors that it takes."""
