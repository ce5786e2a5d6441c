"""Readers: find the files of a source, read records by index and parse them into samples."""
