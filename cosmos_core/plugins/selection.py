"""The plugins of one process: those that its recipe names, imported, checked and registered with pluggy."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, final

import attrs
import pluggy

from cosmos_core.config.problems import nearest
from cosmos_core.config.sources import split
from cosmos_core.config.structure import check_class, structure, unstructure
from cosmos_core.errors import ConfigError, PluginBrokenError, PluginIncompatibleError, told_as
from cosmos_core.plugins.choice import choose, choose_all
from cosmos_core.plugins.compatibility import protocol_deprecation, protocol_mismatch
from cosmos_core.plugins.discovery import PluginRecord, discover
from cosmos_core.plugins.functions import import_function
from cosmos_core.protocols import (
    AlgorithmCapabilities,
    DatasetCapabilities,
    EngineCapabilities,
    EnvironmentCapabilities,
    Kind,
    LauncherCapabilities,
    ModelCapabilities,
    Provider,
    RewardCapabilities,
    hooks,
)
from cosmos_core.protocols.algorithm import AdvantageEstimator
from cosmos_core.protocols.engine import SleepingEngine
from cosmos_core.protocols.hooks import PROJECT
from cosmos_core.protocols.launcher import ClusterLauncher
from cosmos_core.protocols.model import MoEModel, PipelinedModel
from cosmos_core.protocols.vision import VisionModel
from cosmos_core.protocols.world import WorldModel
from cosmos_core.types import JSON

_LACKING: Final = object()
_LOG: Final = logging.getLogger(__name__)
_CAPABILITIES: Final[Mapping[Kind, type]] = {
    "model": ModelCapabilities,
    "algorithm": AlgorithmCapabilities,
    "reward": RewardCapabilities,
    "dataset": DatasetCapabilities,
    "engine": EngineCapabilities,
    "environment": EnvironmentCapabilities,
    "launcher": LauncherCapabilities,
}
"""The record of each kind; hooks declare nothing."""
_OPTIONAL: Final[Mapping[Kind, tuple[type, ...]]] = {
    "model": (MoEModel, PipelinedModel, VisionModel, WorldModel),
    "algorithm": (AdvantageEstimator,),
    "engine": (SleepingEngine,),
    "launcher": (ClusterLauncher,),
}
"""The protocols that some plugins of a kind implement besides, whole or not at all."""


def describe(record: PluginRecord) -> str:
    """A plugin in messages: kind, name and where it comes from."""
    if split(record.module) is not None:
        return f"{record.kind} plugin {record.module!r}"
    return f"{record.kind} plugin {record.name!r} ({record.module} of {record.distribution} {record.version})"


def import_plugin(record: PluginRecord) -> Any:
    """Import what the entry point names.

    Raises:
        PluginBrokenError: The import failed; the original exception is chained.
    """
    if split(record.module) is not None:
        return import_function(record)
    try:
        return record.entry_point.load()
    except (Exception, SystemExit) as error:
        because = f" ({record.problem})" if record.status in ("broken", "not installed") else ""
        raise PluginBrokenError(
            f"{describe(record)} could not be imported: {type(error).__name__}: {error}{because}"
        ) from error


def ask_provider(manager: pluggy.PluginManager, target: Any, record: PluginRecord) -> Provider[Any]:
    """Call the provider hook of one registered plugin and check what it returns.

    Raises:
        PluginBrokenError: There is no such hook, it failed, or what it returned is unusable.
        CosmosError: What the hook itself has to say, such as how to install what it needs.
        PluginIncompatibleError: It was written for another version of the protocol.
    """
    hook = f"cosmos_{record.kind}"
    caller: pluggy.HookCaller = getattr(manager.hook, hook)
    if not any(implementation.plugin is target for implementation in caller.get_hookimpls()):
        raise PluginBrokenError(f"{describe(record)} has no function {hook}() marked @hookimpl")
    others = [plugin for plugin in manager.get_plugins() if plugin is not target]
    with told_as(PluginBrokenError, f"{describe(record)}: {hook}() failed"):
        provider = manager.subset_hook_caller(hook, others)()
    _check(provider, hook, record)
    deprecation = protocol_deprecation(record.kind, provider.protocol)
    if deprecation:
        _LOG.warning("%s: %s", describe(record), deprecation)
    declared = _CAPABILITIES.get(record.kind)
    if provider.capabilities is None and declared is not None:
        provider = attrs.evolve(provider, capabilities=declared())
    return provider  # type: ignore[no-any-return]  # checked above


def _check(provider: Any, hook: str, record: PluginRecord) -> None:
    if inspect.iscoroutine(provider):
        provider.close()
        raise PluginBrokenError(f"{describe(record)}: {hook}() is a coroutine function; it must be a plain one")
    if not isinstance(provider, Provider):
        raise PluginBrokenError(f"{describe(record)}: {hook}() returned {provider!r}, which is no Provider")
    mismatch = protocol_mismatch(record.kind, provider.protocol, record.distribution)
    if mismatch:
        raise PluginIncompatibleError(f"{describe(record)} cannot be used: {mismatch}")
    if not callable(provider.create):
        raise PluginBrokenError(f"{describe(record)}: Provider.create is {provider.create!r}, which is not callable")
    if provider.preflight is not None and (record.kind != "engine" or not callable(provider.preflight)):
        raise PluginBrokenError(
            f"{describe(record)}: Provider.preflight is {provider.preflight!r}; it is a function of an engine's "
            "options and a PlannedRun, or left out"
        )
    declared = _CAPABILITIES.get(record.kind, type(None))
    if not isinstance(provider.capabilities, declared | None):
        raise PluginBrokenError(
            f"{describe(record)}: Provider.capabilities is {provider.capabilities!r}, which is no {declared.__name__}"
        )
    # Planning compares capabilities; one of another type than declared would end it in the middle.
    if provider.capabilities is not None:
        try:
            made = provider.capabilities
            structure(unstructure(made), type(made), type(made).__name__)
        except ConfigError as error:
            raise PluginBrokenError(f"{describe(record)} declares what it cannot: {error}") from None
    try:
        check_class(provider.options)
    except (TypeError, NameError) as error:
        raise PluginBrokenError(
            f"{describe(record)}: its options class is unusable: {error}; "
            "write a class with @attrs.frozen(kw_only=True) whose attributes have types that TOML can express"
        ) from error


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
            PluginNotFoundError: Names are unknown; all of them are told.
            PluginConflictError: Two distributions provide a name.
            PluginIncompatibleError: A plugin was made for another release.
            PluginBrokenError: A plugin cannot be imported or does not keep the protocol.
        """
        plugins = cls()
        wanted = tuple(selections)
        installed = discover(meant=(name for _, name in wanted)) if records is None else records
        # All names are looked up first: a wrong one is told before any import takes its time.
        plugins._take(choose_all(wanted, installed))
        return plugins

    def include(self, kind: Kind, name: str) -> None:
        """Load one more plugin, unless it is there already: what a selected one is made of.

        Raises:
            PluginError: See `load`.
        """
        if (kind, name) not in self._providers:
            self._take({(kind, name): choose(kind, name, discover(meant=[name]))})

    def __iter__(self) -> Iterator[PluginRecord]:
        return iter(self._records.values())

    def record(self, kind: Kind, name: str) -> PluginRecord:
        """The record of where a selected plugin comes from.

        Raises:
            KeyError: It was not selected.
        """
        return self._records[kind, name]

    def provider(self, kind: Kind, name: str) -> Provider[Any]:
        """The provider of a selected plugin.

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
            PluginBrokenError: The plugin failed with an error that it does not explain itself, or implements a part of
                an optional protocol.
        """
        provider = self._providers[kind, name]
        path = path or f"{kind}.options"
        structured: Any = structure(options, provider.options, path)
        try:
            with told_as(PluginBrokenError, f"{describe(self._records[kind, name])} could not be made"):
                made = provider.create(structured, context)
        except ConfigError as error:
            # It begins with the name of an option, or with several.
            first = str(error).partition(":")[0].partition(",")[0]
            if any(first == field.alias for field in attrs.fields(provider.options)):
                raise ConfigError(f"{path}.{error}") from error
            raise
        for problem in _half_implemented(made, _OPTIONAL.get(kind, ())):
            raise PluginBrokenError(f"{describe(self._records[kind, name])} {problem}")
        return made

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

    def _take(self, chosen: Mapping[tuple[Kind, str], PluginRecord]) -> None:
        targets = {}
        for key, record in chosen.items():
            targets[key] = target = import_plugin(record)
            self._records[key] = record
            # One module may provide several kinds or names; pluggy takes each object once, so its hooks run once.
            if self.manager.get_name(target) is None:
                self._add(target, ":".join(key), record)
        self._check_hooks()
        for key, record in chosen.items():
            self._providers[key] = ask_provider(self.manager, targets[key], record)

    def _add(self, target: object, name: str, record: PluginRecord) -> None:
        try:
            registered = self.manager.register(target, name=name)
        except pluggy.PluginValidationError as error:
            told = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
            raise PluginBrokenError(f"{describe(record)} implements a hook wrongly: {told}") from None
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


def _half_implemented(made: object, protocols: Iterable[type]) -> Iterator[str]:
    """Say which protocols an instance implements in part: it would be taken for one that does not mean to."""
    for protocol in protocols:
        own = [name for name in vars(protocol) if not name.startswith("_")]
        lacking = [name for name in own if _lacks(made, protocol, name)]
        has = [name for name in own if name not in lacking]
        # One name of several may be chance.
        if len(has) < min(2, len(own) - 1):
            continue
        of_kind = [name for base in protocol.__mro__[1:-1] for name in (*vars(base), *base.__annotations__)]
        lacking = lacking or [each for each in of_kind if not each.startswith("_") and _lacks(made, protocol, each)]
        if lacking:
            what = f"has {', '.join(has)}, and lacks {', '.join(lacking)}"
            yield f"{what} of `{protocol.__name__}`; give all of them, or none"


def _lacks(made: object, protocol: type, name: str) -> bool:
    """True if an instance has no member of that name, or None in place of a method, as `isinstance` takes it."""
    value = inspect.getattr_static(made, name, _LACKING)
    return value is _LACKING or (value is None and callable(getattr(protocol, name, None)))
