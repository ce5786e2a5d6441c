"""Reports: run folder, live progress line, trackers, and pages and tables of plans, steps, data and replays."""
