"""The command line."""

from freehold.cli.commands import app

__all__ = ["app"]
