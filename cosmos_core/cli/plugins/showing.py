"""`cosmos plugins show`: one plugin in full."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cosmos_core.cli.plugins.options import KindOption
from cosmos_core.cli.plugins.table import columns
from cosmos_core.errors import ConfigError, PluginNotFoundError
from cosmos_core.protocols.versions import KINDS, Kind

if TYPE_CHECKING:
    from cosmos_core.plugin.discovery import PluginRecord
    from cosmos_core.protocols import Provider


def show_plugin(
    name: Annotated[str, typer.Argument(help="The plugin's name, or DISTRIBUTION:NAME.")],
    kind: KindOption = None,
) -> None:
    """Show one plugin: where it comes from, what it can do, and its options. Imports that plugin only."""
    from cosmos_core.plugin.discovery import discover  # noqa: PLC0415  # keeps `cosmos --help` quick
    from cosmos_core.plugin.selection import PluginSet  # noqa: PLC0415

    records = discover()
    chosen = kind or _kind_of(name, records)
    plugins = PluginSet.load([(chosen, name)], records=records)
    for line in _describe(plugins.record(chosen, name), plugins.provider(chosen, name)):
        typer.echo(line)


def _kind_of(selection: str, records: Sequence[PluginRecord]) -> Kind:
    """The kind of the only plugin with a name.

    Raises:
        PluginNotFoundError: There is none.
        ConfigError: There are several kinds.
    """
    from cosmos_core.config.nearest import suggestion  # noqa: PLC0415  # keeps `cosmos --help` quick
    from cosmos_core.plugin.known import KNOWN  # noqa: PLC0415

    name = selection.rpartition(":")[2]
    kinds = [kind for kind in KINDS if any((record.kind, record.name) == (kind, name) for record in records)]
    if len(kinds) > 1:
        raise ConfigError(f"{name} is the name of a {' and of a '.join(kinds)} plugin; say which with --kind")
    if kinds:
        return kinds[0]
    installable = sorted({distribution for (_, known), distribution in KNOWN.items() if known == name})
    hint = (
        f"install it with: pip install {' or '.join(installable)}"
        if installable
        else suggestion(name, {record.name for record in records}, limit=3)
    )
    raise PluginNotFoundError(f"no plugin named {name!r} is installed; {hint}")


def _describe(record: PluginRecord, provider: Provider[Any]) -> Iterator[str]:
    yield f"{record.kind} {record.name}"
    yield from columns(
        [
            ("  distribution", f"{record.distribution} {record.version}"),
            ("  entry point", record.module),
            ("  protocol", str(provider.protocol)),
            ("  status", f"{record.status} ({record.problem})" if record.problem else record.status),
            ("  requires", ", ".join(record.requires) or "nothing"),
        ]
    )
    yield ""
    yield "Capabilities"
    yield from columns([(f"  {name}", text) for name, text in _capabilities(provider.capabilities)])
    yield ""
    yield f"Options ({record.kind}.options)"
    yield from columns([(f"  {option[0]}", *option[1:]) for option in _options(provider.options)])


def _capabilities(capabilities: Any) -> list[tuple[str, str]]:
    import attrs  # noqa: PLC0415  # keeps `cosmos --help` quick

    if not attrs.has(type(capabilities)):
        return [("none declared", "")]
    return [(field.name, _value(getattr(capabilities, field.name))) for field in attrs.fields(type(capabilities))]


def _options(cls: type, prefix: str = "") -> list[tuple[str, str, str, str]]:
    """Name, type, default and help of each option; those of nested classes by their dotted names."""
    import attrs  # noqa: PLC0415  # keeps `cosmos --help` quick

    from cosmos_core.config.shapes import describe  # noqa: PLC0415

    rows = []
    for field in attrs.fields(attrs.resolve_types(cls)):
        name = f"{prefix}{field.alias}"
        if isinstance(field.type, type) and attrs.has(field.type):
            rows += _options(field.type, f"{name}.")
        else:
            rows.append((name, describe(field.type), _default(field), field.metadata.get("help", "")))
    return rows or ([] if prefix else [("none", "", "", "")])


def _default(field: Any) -> str:
    import attrs  # noqa: PLC0415  # keeps `cosmos --help` quick

    if field.default is attrs.NOTHING:
        return "required"
    if isinstance(field.default, attrs.Factory):  # type: ignore[arg-type]  # a class that its stub calls a function
        return "computed" if field.default.takes_self else _value(field.default.factory())
    return _value(field.default)


def _value(value: Any) -> str:
    from cosmos_core.config.problems import show  # noqa: PLC0415  # keeps `cosmos --help` quick
    from cosmos_core.config.structure import unstructure  # noqa: PLC0415

    if value is None:
        return "none"
    plain = unstructure(value)
    return ", ".join(map(str, plain)) or "none" if isinstance(plain, list) else plain if plain == "" else show(plain)
