"""Commands whose options come from records: flags, groups in `--help`, environment variables, a file, and where each
value came from."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import yaml
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from freehold.cli.foreign_flags import HINTS, ForeignFlag, translated
from freehold.contract.errors import FreeholdError
from freehold.options import Option, options_of

SOURCES = {"COMMANDLINE": "flag", "ENVIRONMENT": "environment", "DEFAULT_MAP": "file"}


class Commands(TyperGroup):
    """Commands that end with a line that says what is wrong, not with a traceback, whatever a user can get wrong."""

    def main(self, *args: Any, **given: Any) -> Any:
        try:
            return super().main(*args, **given)
        except (FreeholdError, OSError, ForeignFlag) as error:
            typer.secho(f"freehold: {error}", fg="red", err=True)
            sys.exit(1)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            # Typer brings a copy of click, whose classes are not click's.
            hint = HINTS.get(getattr(error, "option_name", ""))
            if hint is not None:
                raise ForeignFlag(f"there is no {getattr(error, 'option_name', '')} here: {hint}") from error
            if type(error).__module__.partition(".")[0] != "httpx":
                raise
            asked = getattr(error, "request", None)
            raise OSError(f"{'the server' if asked is None else asked.url.host} does not answer: {error}") from error


class ServingCommand(TyperCommand):
    """A command that takes the flags of other engines, too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        switches = {flag for one in self.params if getattr(one, "is_flag", False) for flag in one.opts}
        return super().parse_args(ctx, translated(args, switches))


def size(given: str | int) -> int:
    """Bytes: a number, or one with a unit: 8GB, 512MiB, 4k. Raises typer.BadParameter."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", str(given).strip(), re.IGNORECASE)
    if found is None:
        raise typer.BadParameter(f"'{given}' is no size: use bytes, or a unit as in 8GB or 512MiB")
    base = 1024 if found[3] else 1000
    return int(float(found[1]) * base ** " kmgt".index(found[2].lower() or " "))


def address(url: str) -> str:
    """localhost:8000 -> http://localhost:8000"""
    return url if "://" in url else f"http://{url}"


def sources(context: typer.Context) -> dict[str, str]:
    """Where the values of the options of the command that runs now came from: flag, environment, file or default."""
    found = {name: context.get_parameter_source(name) for name in context.params}
    return {name: SOURCES.get(source.name, "default") if source else "default" for name, source in found.items()}


def read_defaults(context: typer.Context, path: Path | None) -> Path | None:
    """Use a file's values in place of defaults (callback of `--config`). Raises typer.BadParameter for a file that
    can't be read or has a key that is no option."""
    if path is None:
        return None
    try:
        text = path.read_text()
        given = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise typer.BadParameter(f"{path}: {error}") from error
    if not isinstance(given, dict):
        raise typer.BadParameter(f"{path} must hold options by name")
    known = {one.name for one in context.command.params if one.name}
    values = {str(name).replace("-", "_"): value for name, value in given.items()}
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise typer.BadParameter(f"{path}: '{name}' is no option{hint}")
    context.default_map = {**(context.default_map or {}), **values}
    return path


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config", help="TOML or YAML file with options by name. Flags and FREEHOLD_<FLAG> variables take precedence.",
        is_eager=True, callback=read_defaults,
    ),
]  # fmt: skip


def takes(*records: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command. Its first parameters are instances of `records`, made of what was given on the command
    line; the others are ordinary parameters. A value that a record refuses ends the command with its message."""
    declared = {record: list(options_of(record)) for record in records}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command, eval_str=True).parameters.values())[len(records) :]
        flags = [_parameter(one) for options in declared.values() for one in options]

        @functools.wraps(command)
        def run(**given: Any) -> None:
            try:
                made = [record(**{one.name: _value(one, given.pop(one.name)) for one in options})
                        for record, options in declared.items()]  # fmt: skip
            except ValueError as error:
                fail(error)
            command(*made, **given)

        keyword = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in (*flags, *own)]
        run.__signature__ = inspect.Signature(keyword)  # pyright: ignore[reportAttributeAccessIssue]
        run.__annotations__ = {one.name: one.annotation for one in keyword}
        return run

    return decorate


def fail(error: Exception) -> NoReturn:
    """End the command with the error's message and exit code 1."""
    typer.secho(f"freehold: {error}", fg="red", err=True)
    raise typer.Exit(1) from error


def _parameter(one: Option) -> inspect.Parameter:
    flag = f"--{one.name.replace('_', '-')}"
    flags = (flag, *one.flags) if one.type is bool or one.flags else ()
    parser = size if one.is_size else None
    declared = typer.Option(
        *flags, help=escape(one.help), rich_help_panel=one.group, envvar=one.variable, show_envvar=False, parser=parser,
        metavar="SIZE" if one.is_size else None,
    )  # fmt: skip
    repeated = one.type == tuple[str, ...]
    kind = list[str] if repeated else one.type
    default = list(one.default) if repeated else one.default
    if one.is_size and default is not None:
        default = str(default)  # it is parsed as if it had been given
    return inspect.Parameter(
        one.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, declared]
    )


def _value(one: Option, given: Any) -> Any:
    return tuple(given or ()) if one.type == tuple[str, ...] else given
