"""Run the command line with `python -m freehold`."""

from freehold.cli import app

app()
