"""Images, sounds and clips: read their headers and decode them."""
