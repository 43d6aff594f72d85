"""`cosmos plugins`: lists and shows plugins."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from cosmos_core.cli.commands import OpenGroup

if TYPE_CHECKING:
    from cosmos_core.plugins.card import Card
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
    """List and show plugins; `cosmos plugins new` and `cosmos check` of cosmos-service-check make and judge them."""


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
    typer.echo("\n".join(_columns([("KIND", "NAME", "DISTRIBUTION", "VERSION", "STATUS"), *rows])))
    for record in records:
        if record.problem:
            typer.echo(f"\n{record.kind} {record.name}: {record.problem}")


@app.command("show")
def show_plugin(
    name: Annotated[str, typer.Argument(help="The plugin's name, or DISTRIBUTION:NAME.")],
    kind: KindOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one plugin: where it comes from, what it can do, and its options. Imports that plugin only."""
    from cosmos_core.plugins.card import card, plain  # noqa: PLC0415
    from cosmos_core.plugins.choice import kind_of  # noqa: PLC0415
    from cosmos_core.plugins.discovery import discover  # noqa: PLC0415
    from cosmos_core.plugins.selection import PluginSet  # noqa: PLC0415

    records = discover()
    chosen = kind or kind_of(name, records)
    shown = card(PluginSet.load([(chosen, name)], records=records), chosen, name)
    typer.echo(json.dumps(plain(shown), indent=2) if as_json else "\n".join(_lines(shown)))


def _lines(card: Card) -> Iterator[str]:
    record, source = card.record, card.source
    yield f"{record.kind} {record.name}"
    facts: list[tuple[str, Any]] = [
        ("distribution", f"{record.distribution} {record.version}"),
        ("summary", source.summary),
        ("home page", source.home_page),
        ("licence", source.licence),
        ("location", source.location),
        ("editable", source.editable),
        ("sha256", card.sha256),
        ("entry point", record.module),
        ("protocol", card.protocol),
        ("status", f"{record.status} ({record.problem})" if record.problem else record.status),
        ("requires", ", ".join(record.requires) or "nothing"),
    ]
    yield from _columns([(f"  {label}", str(value)) for label, value in facts if value])
    yield from ("", "Capabilities")
    yield from _columns(
        [(f"  {each.name}", each.value, each.meaning) for each in card.capabilities] or [("  none declared",)]
    )
    yield from ("", f"Options ({record.kind}.options)")
    yield from _columns(
        [
            (f"  {key.name}", f"{key.type}, {key.bounds}" if key.bounds else key.type, key.default, key.meaning)
            for key in card.options
        ]
        or [("  none",)]
    )


def _columns(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    listed = list(rows)
    widths = [max(len(cell) for cell in column) for column in zip(*listed, strict=True)]
    for row in listed:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
