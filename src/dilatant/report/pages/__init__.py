"""HTML pages and Perfetto traces."""
