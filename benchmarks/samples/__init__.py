"""Reading, indexing and preparing samples."""
