"""`python -m freehold`: the command."""

from freehold.cli import app

app()
