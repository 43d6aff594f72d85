"""The command `cosmos plugins show`: one plugin, with what it declares and its options."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cosmos_core.cli.plugins import JsonOption, KindOption, columns

if TYPE_CHECKING:
    from cosmos_service_tools.card import Card


def show(
    name: Annotated[str, typer.Argument(help="The plugin's name, or DISTRIBUTION:NAME.")],
    kind: KindOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one plugin: where it comes from, what it can do, and its options. Imports that plugin only."""
    from cosmos_core.plugins.choice import kind_of  # noqa: PLC0415
    from cosmos_core.plugins.discovery import discover  # noqa: PLC0415
    from cosmos_core.plugins.selection import PluginSet  # noqa: PLC0415
    from cosmos_service_tools.card import card, plain  # noqa: PLC0415

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
    yield from columns([(f"  {label}", str(value)) for label, value in facts if value])
    yield from ("", "Capabilities")
    yield from columns(
        [(f"  {each.name}", each.value, each.meaning) for each in card.capabilities] or [("  none declared",)]
    )
    yield from ("", f"Options ({record.kind}.options)")
    yield from columns(
        [
            (f"  {key.name}", f"{key.type}, {key.bounds}" if key.bounds else key.type, key.default, key.meaning)
            for key in card.options
        ]
        or [("  none",)]
    )
