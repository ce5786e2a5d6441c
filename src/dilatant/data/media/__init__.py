"""Media files: read the headers of images, sounds and clips, and decode them."""
