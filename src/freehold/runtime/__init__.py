"""Puts an engine together from its configuration."""
