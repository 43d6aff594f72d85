"""Directives about the kinds of plugin, from `cosmos_core.protocols`.

`kind-reference KIND`: all that a kind's protocol declares, with exact signatures. `record NAME`: one record's fields.
`protocol-versions`: which versions are spoken and accepted.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import pkgutil
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, Final

import attrs
from sphinx.application import Sphinx

from cosmos_core import protocols
from cosmos_core.protocols import PROTOCOL_VERSIONS, hooks
from cosmos_core.protocols.provider import DEPRECATED_PROTOCOLS, Kind
from reference import records
from reference.markdown import code, directive, table
from reference.signatures import declaration

_MODULES: Final = {"hook": "hooks"}


def setup(app: Sphinx) -> Mapping[str, bool]:
    """Register the directives."""
    app.add_directive("kind-reference", directive(reference, takes_argument=True))
    app.add_directive("protocol-versions", directive(lambda _: versions(), takes_argument=False))
    app.add_directive("record", directive(one_record, takes_argument=True))
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def reference(kind: Kind) -> str:
    """The provider hook, the protocols with their methods, and the records of a kind."""
    module = importlib.import_module(f"cosmos_core.protocols.{_MODULES.get(kind, kind)}")
    head = [
        "## Reference",
        f"Version {PROTOCOL_VERSIONS[kind]} of the {kind} protocol. The provider hook:",
        code(f"@hookimpl\n{declaration(getattr(hooks, f'cosmos_{kind}'))}"),
    ]
    main = inspect.signature(getattr(hooks, f"cosmos_{kind}")).return_annotation
    return "\n\n".join([*head, *_classes(module, main), *_aliases(module)])


def one_record(name: str) -> str:
    """The fields of one public record of the protocols, and the module that it is imported from."""
    modules = [each.name for each in pkgutil.iter_modules(protocols.__path__, "cosmos_core.protocols.")]
    found = {path: getattr(importlib.import_module(path), name, None) for path in modules}
    path, cls = next((path, cls) for path, cls in found.items() if cls is not None and cls.__module__ == path)
    home = "cosmos_core.protocols" if hasattr(protocols, name) else path
    return f"From `{home}`: {records.summary(cls)}\n\n{records.record(cls)}"


def versions() -> str:
    """The version of each kind's protocol, and the older ones that are still accepted."""
    rows = []
    for kind, version in PROTOCOL_VERSIONS.items():
        older = DEPRECATED_PROTOCOLS.get(kind, {})
        accepted = [f"{number}, until cosmos-core {release} refuses it" for number, release in older.items()]
        rows.append((f"[{kind}](/plugins/{kind}.md)", str(version), "; ".join(accepted) or "none"))
    return table(("kind", "version", "older versions that are accepted"), rows)


def _classes(module: ModuleType, main: str) -> Iterator[str]:
    """What a provider makes (`main` names it) comes first, then the other protocols, then the records."""
    own = [cls for _, cls in vars(module).items() if inspect.isclass(cls) and cls.__module__ == module.__name__]
    for cls in sorted(own, key=lambda cls: (f"[{cls.__name__}]" not in main, not _is_protocol(cls))):
        body = _protocol(cls) if _is_protocol(cls) else _record(cls)
        yield f"### `{cls.__name__}`\n\n{records.summary(cls)}\n\n{body}"


def _is_protocol(cls: type) -> bool:
    return bool(getattr(cls, "_is_protocol", False))


def _protocol(cls: type) -> str:
    members = [(name, member) for name, member in vars(cls).items() if not name.startswith("_")]
    return "\n\n".join(_member(member) for _, member in members if callable(member) or isinstance(member, property))


def _member(member: Any) -> str:
    return "\n\n".join(filter(None, [code(declaration(member)), records.summary(member), records.details(member)]))


def _record(cls: type) -> str:
    if issubclass(cls, enum.Enum):
        return records.choices(cls)
    return records.record(cls) if attrs.has(cls) else ""


def _aliases(module: ModuleType) -> Iterator[str]:
    for name, meaning in records.aliases(module):
        yield f"`{name}` is `{meaning}`."
