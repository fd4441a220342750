"""`freehold ...`, in the tests' own process."""

from __future__ import annotations

from typer.testing import CliRunner

from freehold.cli import app


def run(*arguments: object, given: str = "", **environment: str) -> tuple[int, str]:
    """Run a command with `given` as its input -> the exit code and the output. Raises what no command should raise."""
    env = {"COLUMNS": "200", **environment}
    done = CliRunner().invoke(app, list(map(str, arguments)), input=given, env=env, prog_name="freehold")
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output
