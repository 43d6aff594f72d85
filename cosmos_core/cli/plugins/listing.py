"""`cosmos plugins list`: what is installed, from metadata alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import typer

from cosmos_core.cli.plugins.options import JsonOption, KindOption
from cosmos_core.cli.plugins.table import columns

if TYPE_CHECKING:
    from cosmos_core.plugins.discovery import PluginRecord


def list_plugins(
    kind: KindOption = None,
    as_json: JsonOption = False,
) -> None:
    """List what is installed, with what is wrong with it. Imports no plugin."""
    from cosmos_core.plugins.discovery import DISABLE_VARIABLE, autoload_disabled, discover  # noqa: PLC0415  # keeps `cosmos --help` quick

    records = discover(kind)
    if autoload_disabled():
        typer.echo(f"{DISABLE_VARIABLE} is set: only cosmos-core's own plugins are seen.", err=True)
    if as_json:
        typer.echo(json.dumps([_plain(record) for record in records], indent=2))
        return
    if not records:
        typer.echo(f"No {kind or ''} plugins are installed.".replace("  ", " "))
        return
    rows = [(each.kind, each.name, each.distribution, each.version, each.status) for each in records]
    for line in columns([("KIND", "NAME", "DISTRIBUTION", "VERSION", "STATUS"), *rows]):
        typer.echo(line)
    for record in records:
        if record.problem:
            typer.echo(f"\n{record.kind} {record.name}: {record.problem}")


def _plain(record: PluginRecord) -> dict[str, str]:
    fields = ("kind", "name", "distribution", "version", "module", "status", "problem")
    return {field: getattr(record, field) for field in fields}
