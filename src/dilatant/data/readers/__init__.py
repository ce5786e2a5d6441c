"""Readers: find the files of a source and read its records as samples."""
