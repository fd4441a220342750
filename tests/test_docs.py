"""Names in the documentation are names of something: files, flags and routes."""

import re
from pathlib import Path

import pytest
import typer

from freehold.cli import app
from freehold.cli.foreign_flags import GRANTED, HINTS, LIMITED, RENAMED, VALUES, WITHOUT_EFFECT
from freehold.server.access.rights import RIGHTS

ROOT = Path(__file__).parent.parent
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
OF_OTHERS = {*GRANTED, *HINTS, *LIMITED, *RENAMED, *VALUES, *WITHOUT_EFFECT, "--swap-space"}


def texts():
    return [(doc.name, doc.read_text()) for doc in DOCS]


def test_files_exist():
    files = {str(path.relative_to(ROOT)) for part in ("src", "tests", "examples", "conformance", "benchmarks")
             for path in (ROOT / part).rglob("*.py")}  # fmt: skip
    lost = {
        (doc, name)
        for doc, text in texts()
        for name in re.findall(r"`([\w/]+\.py)\b", text)
        if not any(file == name or file.endswith(f"/{name}") for file in files)
    }
    assert not lost


def test_flags_exist():
    known = flags(typer.main.get_command(app)) | OF_OTHERS
    lost = {(doc, flag) for doc, text in texts() for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", text)} - {
        (doc, flag) for doc, _ in texts() for flag in known
    }
    assert not lost


def test_routes_exist():
    known = {re.sub(r"{\w+(:path)?}", "{}", route) for route in RIGHTS}
    lost = {
        (doc, route)
        for doc, text in texts()
        for route in re.findall(r"(?:GET|POST|PUT|DELETE) (/[\w/{}-]+)", text)
        if re.sub(r"{\w+}", "{}", route) not in known
    }
    assert not lost


def flags(command) -> set[str]:
    found = {flag for one in command.params for flag in (*one.opts, *one.secondary_opts)} | {"--help"}
    for child in getattr(command, "commands", {}).values():
        found |= flags(child)
    return found


@pytest.mark.parametrize("doc", DOCS, ids=lambda doc: doc.name)
def test_links_lead_somewhere(doc):
    lost = [
        link for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", doc.read_text()) if not (doc.parent / link).exists()
    ]
    assert not lost
