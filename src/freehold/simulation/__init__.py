"""The real scheduler and memory against an engine that has no model but checks every read."""
