"""From a chosen plugin to its `Provider`: import, the provider hook, and whether what it returns holds together."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any, Final

import attrs
import pluggy

from cosmos_core.config.structure import check_class, structure, unstructure
from cosmos_core.errors import ConfigError, CosmosError, PluginBrokenError, PluginIncompatibleError
from cosmos_core.plugins.compatibility import protocol_deprecation, protocol_mismatch
from cosmos_core.plugins.discovery import PluginRecord
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
)

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


def describe(record: PluginRecord) -> str:
    """A plugin in messages: kind, name and where it comes from."""
    return f"{record.kind} plugin {record.name!r} ({record.module} of {record.distribution} {record.version})"


def import_plugin(record: PluginRecord) -> Any:
    """Import what the entry point names.

    Raises:
        PluginBrokenError: The import failed; the original exception is chained.
    """
    try:
        return record.entry_point.load()
    except (Exception, SystemExit) as error:
        because = f" ({record.problem})" if record.status == "broken" else ""
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
    try:
        provider = manager.subset_hook_caller(hook, others)()
    except CosmosError:
        raise
    except Exception as error:
        raise PluginBrokenError(f"{describe(record)}: {hook}() failed: {type(error).__name__}: {error}") from error
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
    if provider.foresee is not None and (record.kind != "engine" or not callable(provider.foresee)):
        raise PluginBrokenError(
            f"{describe(record)}: Provider.foresee is {provider.foresee!r}; it is a function of an engine's options "
            "and an EngineOutlook, or left out"
        )
    declared = _CAPABILITIES.get(record.kind, type(None))
    if not isinstance(provider.capabilities, declared | None):
        raise PluginBrokenError(
            f"{describe(record)}: Provider.capabilities is {provider.capabilities!r}, which is no {declared.__name__}"
        )
    _check_types(provider.capabilities, record)
    try:
        check_class(provider.options)
    except (TypeError, NameError) as error:
        raise PluginBrokenError(
            f"{describe(record)}: its options class is unusable: {error}; "
            "write a class with @attrs.frozen(kw_only=True) whose attributes have types that TOML can express"
        ) from error


def _check_types(capabilities: Any, record: PluginRecord) -> None:
    """Planning compares capabilities; one of another type than declared would end it in the middle."""
    if capabilities is None:
        return
    try:
        structure(unstructure(capabilities), type(capabilities), type(capabilities).__name__)
    except ConfigError as error:
        raise PluginBrokenError(f"{describe(record)} declares what it cannot: {error}") from None
