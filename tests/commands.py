"""`freehold ...`, in the tests' own process."""

from __future__ import annotations

from typer.testing import CliRunner

from freehold.cli import app


def run(*arguments: object, given: str = "") -> tuple[int, str]:
    """-> the exit code, and what was said. Raises what no command should raise."""
    done = CliRunner().invoke(app, list(map(str, arguments)), input=given, env={"COLUMNS": "200"}, prog_name="freehold")
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output
