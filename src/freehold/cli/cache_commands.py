"""`freehold cache`: stored KV without a server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from freehold.cli.command_line import fail, size

if TYPE_CHECKING:
    from freehold.store.store import Store

cache_app = typer.Typer(help="Look after stored KV, while no server uses it.", no_args_is_help=True)

Location = Annotated[str, typer.Argument(help="A folder, redis://host:port/0 or s3://bucket/prefix.")]
File = Annotated[Path, typer.Argument(help="The file.", dir_okay=False)]
console = Console()


@contextmanager
def _opened(location: str, is_read_only: bool = True, capacity: str = "64GiB") -> Iterator[Store]:
    """End the program with what is wrong."""
    from freehold.store.entry import Damaged
    from freehold.store.location import open_store
    from freehold.store.store import StoreUnavailable

    try:
        store = open_store(location, size(capacity), is_read_only)
        try:
            yield store
        finally:
            store.close()
    except ImportError as error:
        _missing(error)
    except (StoreUnavailable, Damaged, ValueError) as error:
        fail(error)


def _missing(error: ImportError) -> NoReturn:
    extra = {"redis": "redis", "obstore": "s3"}.get(error.name or "", error.name)
    fail(ImportError(f"{error.name} is not installed: pip install 'freehold[{extra}]'"))


@cache_app.command("ls")
def ls(location: Location, limit: Annotated[int, typer.Option(help="Entries to show at most.", min=1)] = 100) -> None:
    """List entries: the beginning of the key, the size, what it is. Then what is there of others, which stays."""
    from freehold.store.upkeep import examine

    table = Table("key", "size", "what it is")
    with _opened(location) as store:
        for number, found in enumerate(examine(store)):
            if number == limit:
                table.add_row("...", "", "")
                break
            table.add_row(found.key.hex()[:16], decimal(found.size), found.damage or found.about)
        foreign = list(store.foreign())
    console.print(table)
    if foreign:
        names = ", ".join(foreign[:limit]) + (", ..." if len(foreign) > limit else "")
        console.print(f"{len(foreign):,} foreign: {names}", highlight=False, markup=False, soft_wrap=True)


@cache_app.command("stats")
def stats(location: Location) -> None:
    """Count entries and bytes."""
    from freehold.store.upkeep import examine

    with _opened(location) as store, console.status("Reading all entries ..."):
        sizes = [found.size for found in examine(store)]
    console.print(f"{len(sizes):,} entries, {decimal(sum(sizes))}", highlight=False)


@cache_app.command("verify")
def verify(location: Location) -> None:
    """Read every entry and check every byte. Exit code 1 if one is damaged: such an entry is never served."""
    from freehold.store.upkeep import examine

    good = bad = 0
    with _opened(location) as store, console.status("Checking ..."):
        for found in examine(store):
            good, bad = good + (found.damage is None), bad + (found.damage is not None)
            if found.damage is not None:
                console.print(f"{found.key.hex()}: {found.damage}", highlight=False, soft_wrap=True)
    console.print(f"{good:,} entries are whole, {bad:,} are damaged", highlight=False)
    if bad:
        raise typer.Exit(1)


@cache_app.command("prune")
def prune(location: Location) -> None:
    """Delete damaged entries."""
    from freehold.store import upkeep

    with _opened(location, is_read_only=False) as store, console.status("Checking ..."):
        count, freed = upkeep.prune(store)
    console.print(f"deleted {count:,} entries, {decimal(freed)}", highlight=False)


@cache_app.command("export")
def export(location: Location, file: File) -> None:
    """Copy all whole entries to one file."""
    from freehold.store import upkeep

    with _opened(location) as store, console.status("Copying ..."):
        count = upkeep.export(store, file)
    console.print(f"{count:,} entries in {file}", highlight=False)


@cache_app.command("import")
def import_(
    location: Location,
    file: File,
    capacity: Annotated[str, typer.Option(help="How large a folder may become: bytes, or 64GiB.")] = "64GiB",
) -> None:
    """Store the entries of a file that `export` wrote."""
    from freehold.store import upkeep

    with _opened(location, is_read_only=False, capacity=capacity) as store, console.status("Copying ..."):
        stored, count = upkeep.import_from(store, file)
    console.print(f"{stored:,} of {count:,} entries are stored", highlight=False)
