"""From a plugin's name to every other name in its package."""

from __future__ import annotations

from typing import Final

import attrs

from cosmos_core import protocols
from cosmos_core.config.nearest import nearest
from cosmos_core.errors import ConfigError
from cosmos_core.plugins.naming import RULE, is_valid, nearest_valid
from cosmos_core.protocols import KINDS, Kind, entry_point_group

LONGEST: Final = 40
"""Characters of a name. The templates' lines are laid out for it."""

_IMPORTED: Final = frozenset({*protocols.__all__, "HuggingFaceModel", "HuggingFaceOptions"})
"""Classes that a template may import: a plugin's own must have another name."""


@attrs.frozen(kw_only=True)
class Names:
    """The names of one package.

    Attributes:
        kind: The plugin's kind.
        name: What recipes say, `slow-one`.
    """

    kind: Kind
    name: str

    @classmethod
    def of(cls, kind: str, name: str) -> Names:
        """Check what a user typed.

        Raises:
            ConfigError: There is no such kind, or the name cannot be that of a plugin.
        """
        names = cls(kind=_kind(kind), name=name)
        prefix = f"cosmos-{kind}-"
        if not is_valid(name):
            example = nearest_valid(name)[:LONGEST].rstrip("-").removeprefix(prefix) or f"my-{kind}"
            raise ConfigError(f"a plugin cannot be named {name!r}: {RULE}, such as {example}")
        if name.startswith(prefix):
            raise ConfigError(f"the distribution's name is made from the plugin's: leave {prefix} out of {name!r}")
        if len(name) > LONGEST:
            raise ConfigError(f"the name {name!r} has {len(name)} characters; take one of at most {LONGEST}")
        taken = _IMPORTED & {names.plugin_class, names.options_class}
        if taken:
            raise ConfigError(f"a plugin named {name!r} would have a class {min(taken)}, as the core has; take another")
        return names

    @property
    def distribution(self) -> str:
        """What pip installs: `cosmos-engine-slow-one`."""
        return f"cosmos-{self.kind}-{self.name}"

    @property
    def package(self) -> str:
        """What Python imports: `cosmos_engine_slow_one`."""
        return self.distribution.replace("-", "_")

    @property
    def group(self) -> str:
        """The entry-point group of the kind."""
        return entry_point_group(self.kind)

    @property
    def plugin_class(self) -> str:
        """The class that does the work: `SlowOneEngine`."""
        kind, stem = self.kind.capitalize(), self._stem
        return stem if stem.endswith(kind) and stem != kind else stem + kind

    @property
    def options_class(self) -> str:
        """The class of its options: `SlowOneOptions`."""
        return f"{self._stem}Options"

    @property
    def _stem(self) -> str:
        return "".join(word.capitalize() for word in self.name.split("-"))


def _kind(typed: str) -> Kind:
    for kind in KINDS:
        if kind == typed:
            return kind
    close = nearest(typed, KINDS)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise ConfigError(f"{typed!r} is no kind of plugin{hint} (kinds: {', '.join(KINDS)})")
