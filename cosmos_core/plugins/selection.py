"""The plugins of one process: those that its recipe names, imported, checked and registered with pluggy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, final

import attrs
import pluggy

from cosmos_core.config.nearest import nearest
from cosmos_core.config.structure import structure
from cosmos_core.errors import ConfigError, CosmosError, PluginBrokenError
from cosmos_core.plugins.choice import choose
from cosmos_core.plugins.discovery import PluginRecord, discover
from cosmos_core.plugins.providing import ask_provider, describe, import_plugin
from cosmos_core.protocols import PROJECT, Kind, Provider, hooks
from cosmos_core.types import JSON


@final
class PluginSet:
    """Selected plugins. Iterating yields their records, in the order of selection.

    Attributes:
        manager: The one plugin manager of the run; plugins are registered as `kind:selection`.
    """

    __slots__ = ("_providers", "_records", "_registered", "manager")

    def __init__(self) -> None:
        self.manager: Final = pluggy.PluginManager(PROJECT)
        self.manager.add_hookspecs(hooks)
        self._records: Final[dict[tuple[Kind, str], PluginRecord]] = {}
        self._registered: Final[dict[str | None, PluginRecord]] = {}
        self._providers: Final[dict[tuple[Kind, str], Provider[Any]]] = {}

    @classmethod
    def load(
        cls, selections: Iterable[tuple[Kind, str]], *, records: Sequence[PluginRecord] | None = None
    ) -> PluginSet:
        """Import, register and check plugins; nothing that is not selected is imported.

        Args:
            selections: (kind, name or `distribution:name`); repeated ones count once.
            records: What is installed; discovered if not given.

        Raises:
            PluginNotFoundError: A name is unknown.
            PluginConflictError: Two distributions provide a name.
            PluginIncompatibleError: A plugin was made for another release.
            PluginBrokenError: A plugin cannot be imported or does not keep the protocol.
        """
        plugins = cls()
        installed = discover() if records is None else records
        # All names are looked up first: a wrong one is told before any import takes its time.
        chosen = {(kind, name): choose(kind, name, installed) for kind, name in selections}
        targets = {key: plugins._register(key, record) for key, record in chosen.items()}
        plugins._check_hooks()
        for key, record in chosen.items():
            plugins._providers[key] = ask_provider(plugins.manager, targets[key], record)
        return plugins

    def include(self, kind: Kind, name: str) -> None:
        """Load one more plugin, unless it is there already: what a selected one is made of.

        Raises:
            PluginError: See `load`.
        """
        if (kind, name) in self._providers:
            return
        record = choose(kind, name, discover())
        target = self._register((kind, name), record)
        self._check_hooks()
        self._providers[kind, name] = ask_provider(self.manager, target, record)

    def __iter__(self) -> Iterator[PluginRecord]:
        return iter(self._records.values())

    @property
    def records(self) -> tuple[PluginRecord, ...]:
        """The selected plugins, in the order of selection."""
        return tuple(self._records.values())

    def record(self, kind: Kind, name: str) -> PluginRecord:
        """Where a selected plugin comes from.

        Raises:
            KeyError: It was not selected.
        """
        return self._records[kind, name]

    def provider(self, kind: Kind, name: str) -> Provider[Any]:
        """What a selected plugin provides.

        Raises:
            KeyError: It was not selected.
        """
        return self._providers[kind, name]

    def create(self, kind: Kind, name: str, options: Mapping[str, JSON], context: Any, path: str = "") -> Any:
        """Make an instance of a selected plugin.

        Args:
            kind: Its kind.
            name: The name with which it was selected.
            options: The recipe's options, structured into the plugin's own class.
            context: The context record of that kind.
            path: Key path of the options in error messages; `<kind>.options` if empty.

        Raises:
            ConfigError: An option is unknown or wrong; one of which the plugin says so itself (`OPTION: …`) is named by
                its key path, too.
            PluginBrokenError: The plugin failed with an error that it does not explain itself.
        """
        provider = self._providers[kind, name]
        path = path or f"{kind}.options"
        structured: Any = structure(options, provider.options, path)
        try:
            return provider.create(structured, context)
        except ConfigError as error:
            if _is_of_option(str(error), provider.options):
                raise ConfigError(f"{path}.{error}") from error
            raise
        except CosmosError:
            raise
        except Exception as error:
            record = self._records[kind, name]
            raise PluginBrokenError(f"{describe(record)} could not be made: {type(error).__name__}: {error}") from error

    def check_hook(self, name: str) -> None:
        """Check what a hook plugin implements before an instance of it is made, where its class tells.

        Raises:
            PluginBrokenError: It implements a hook that does not exist, or with wrong arguments.
        """
        made_by = self._providers["hook", name].create
        if isinstance(made_by, type):
            apart = PluginSet()
            apart._records["hook", name] = self._records["hook", name]
            apart.attach(name, made_by)

    def attach(self, name: str, instance: object) -> None:
        """Register an instance that a hook plugin made, so that its lifecycle hooks are called.

        Raises:
            PluginBrokenError: It implements a hook that does not exist, or with wrong arguments.
        """
        record = self._records["hook", name]
        self._add(instance, f"hook:{name}:instance", record)
        self._check_hooks()

    def _register(self, key: tuple[Kind, str], record: PluginRecord) -> Any:
        target = import_plugin(record)
        self._records[key] = record
        # One module may provide several kinds or names; pluggy takes each object once, so its hooks run once.
        if self.manager.get_name(target) is None:
            self._add(target, ":".join(key), record)
        return target

    def _add(self, target: object, name: str, record: PluginRecord) -> None:
        try:
            registered = self.manager.register(target, name=name)
        except pluggy.PluginValidationError as error:
            raise PluginBrokenError(f"{describe(record)} implements a hook wrongly: {_one_line(error)}") from None
        assert registered == name, f"{name} was registered before"
        self._registered[name] = record

    def _check_hooks(self) -> None:
        """A misspelt hook would never be called; it is an error instead."""
        try:
            self.manager.check_pending()
        except pluggy.PluginValidationError as error:
            known = [hook for hook in vars(hooks) if hook.startswith("cosmos_")]
            wrong = str(error).partition("unknown hook '")[2].partition("'")[0]
            close = nearest(wrong, known)
            hint = f"; did you mean {close[0]}?" if close else f"; hooks are {', '.join(known)}"
            record = self._registered[self.manager.get_name(error.plugin)]
            raise PluginBrokenError(f"{describe(record)} implements {wrong}, which is no hook{hint}") from None


def _one_line(error: Exception) -> str:
    return "; ".join(line.strip() for line in str(error).splitlines() if line.strip())


def _is_of_option(message: str, options: type) -> bool:
    """Whether a message begins with the name of an option, or with several."""
    first = message.partition(":")[0].partition(",")[0]
    return any(first == field.alias for field in attrs.fields(options))
