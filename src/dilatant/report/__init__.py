"""Showing it: the run folder, the live line, the trackers, the plan page and replays of failures."""
