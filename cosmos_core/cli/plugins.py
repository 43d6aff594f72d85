"""`cosmos plugins`: lists plugins, and has the commands of other distributions about them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from cosmos_core.cli.commands import OpenGroup

if TYPE_CHECKING:
    from cosmos_core.protocols import Kind


def _kind(typed: str) -> Kind:
    from cosmos_core.protocols import KINDS  # noqa: PLC0415

    for kind in KINDS:
        if kind == typed:
            return kind
    raise typer.BadParameter(f"{typed!r} is not one of {', '.join(KINDS)}.")


KindOption = Annotated[Any, typer.Option("--kind", metavar="KIND", parser=_kind, help="Only plugins of this kind.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


class _Plugins(OpenGroup):
    parent: ClassVar = "plugins"


app = typer.Typer(cls=_Plugins, no_args_is_help=True, add_completion=False, rich_markup_mode=None)


@app.callback()
def _root() -> None:
    """List plugins; other distributions show one (cosmos-service-tools), make and judge one (cosmos-service-check)."""


@app.command("list")
def list_plugins(kind: KindOption = None, as_json: JsonOption = False) -> None:
    """List what is installed, with what is wrong with it. Imports no plugin."""
    from cosmos_core.plugins.discovery import DISABLE_VARIABLE, autoload_disabled, discover  # noqa: PLC0415

    records = discover(kind)
    if autoload_disabled():
        typer.echo(f"{DISABLE_VARIABLE} is set: only cosmos-core's own plugins are seen.", err=True)
    if as_json:
        fields = ("kind", "name", "distribution", "version", "module", "status", "problem")
        typer.echo(json.dumps([{field: getattr(record, field) for field in fields} for record in records], indent=2))
        return
    if not records:
        typer.echo(f"No {kind or ''} plugins are installed.".replace("  ", " "))
        return
    rows = [(each.kind, each.name, each.distribution, each.version, each.status) for each in records]
    typer.echo("\n".join(columns([("KIND", "NAME", "DISTRIBUTION", "VERSION", "STATUS"), *rows])))
    for record in records:
        if record.problem:
            typer.echo(f"\n{record.kind} {record.name}: {record.problem}")


def columns(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Lines of cells, below one another."""
    listed = list(rows)
    widths = [max(len(cell) for cell in column) for column in zip(*listed, strict=True)]
    for row in listed:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
