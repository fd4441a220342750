"""Capacity planning: the real scheduler and memory, replaying a trace on an engine of a given speed."""
