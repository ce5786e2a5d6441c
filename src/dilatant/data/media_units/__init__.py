"""Media units: tokens that an encoder makes of a media item, and the tensors that it takes."""
