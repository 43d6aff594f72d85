"""What every plugin of every kind must satisfy: it is found, loads, and has options that teach."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import attrs
import pytest

from cosmos_core.config.reference import fields
from cosmos_core.config.structure import structure
from cosmos_core.errors import ConfigError, PluginError
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import Kind, Provider
from cosmos_core.testing.conformance.options import not_frozen, shared_defaults, undocumented
from cosmos_core.types import JSON

_UNKNOWN_KEY = "no_plugin_has_this_option"


def fault(message: str) -> NoReturn:
    """Fail the test with a message for the plugin's author: what is wrong, the value seen, what to do."""
    pytest.fail(message, pytrace=False)


class PluginConformance:
    """The part of the kit that all kinds share; inherit the class of a kind, never this one.

    Attributes:
        kind: Set by the class of each kind.
        plugin: The name with which recipes select the plugin, or `distribution:name`; set by the test class.
    """

    kind: ClassVar[Kind]
    plugin: ClassVar[str]

    @pytest.fixture
    def options(self) -> Mapping[str, JSON]:
        """The options to test with, as a recipe gives them; override it where the defaults do not do."""
        return {}

    @pytest.fixture
    def context(self, tmp_path: Path) -> Any:
        """The kind's context record; each kind's class makes one."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def plugins(cls) -> PluginSet:
        """The plugin, loaded as a run loads it."""
        try:
            return PluginSet.load([(cls.kind, cls.plugin)])
        except PluginError as error:
            fault(str(error))

    @pytest.fixture
    def provider(self, plugins: PluginSet) -> Provider[Any]:
        """What the plugin's provider hook returned; unset capabilities are the kind's defaults."""
        return plugins.provider(self.kind, self.plugin)

    @pytest.fixture
    def capabilities(self, provider: Provider[Any]) -> Any:
        """What the plugin declares."""
        return provider.capabilities

    @pytest.fixture
    def make(self, plugins: PluginSet, options: Mapping[str, JSON], context: Any) -> Callable[..., Any]:
        """Make an instance of the plugin: `make()`, or `make(option=value)` to change some of `options`."""

        def create(**changes: JSON) -> Any:
            return plugins.create(self.kind, self.plugin, {**options, **changes}, context)

        return create

    def test_the_plugin_is_found_and_can_be_used(self, plugins: PluginSet) -> None:
        """Its metadata names what exists, and its requirements are met."""
        record = plugins.record(self.kind, self.plugin)
        if record.status not in ("ok", "conflict"):
            fault(f"{record.kind} {record.name} of {record.distribution} is {record.status}: {record.problem}")

    def test_it_can_be_made_twice(self, make: Callable[..., Any]) -> None:
        """Every process makes an instance of its own from the same options."""
        first, second = make(), make()
        if first is second:
            fault("Provider.create returned the same object twice; make a new instance at each call")

    def test_options_are_frozen(self, provider: Provider[Any]) -> None:
        """Nothing may rewrite what the recipe says."""
        _fault_if(not_frozen(provider.options))

    def test_every_option_documents_itself(self, provider: Provider[Any]) -> None:
        """`cosmos plugins show` prints what each option is for."""
        _fault_if(undocumented(provider.options))

    def test_no_option_has_a_mutable_default(self, provider: Provider[Any]) -> None:
        """A default that is shared between instances changes under their feet."""
        _fault_if(shared_defaults(provider.options))

    def test_no_option_is_dynamic_that_no_run_would_change(self, provider: Provider[Any]) -> None:
        """`cosmos set` changes options of algorithms, and of nothing else."""
        named = [name for name, field in fields(provider.options) if field.metadata.get("dynamic")]
        if named and self.kind != "algorithm":
            fault(f"options that are dynamic: {', '.join(named)}; those of algorithms can be, not of a {self.kind}")

    def test_an_unknown_option_is_refused(self, provider: Provider[Any], options: Mapping[str, JSON]) -> None:
        """A misspelt key never goes unnoticed."""
        with pytest.raises(ConfigError, match=_UNKNOWN_KEY):
            structure({**options, _UNKNOWN_KEY: 1}, provider.options, f"{self.kind}.options")

    def test_making_it_changes_no_option(
        self, provider: Provider[Any], options: Mapping[str, JSON], context: Any
    ) -> None:
        """Options are read, never written: the manifest would tell of others than were used."""
        given: Any = structure(options, provider.options, f"{self.kind}.options")
        before = attrs.asdict(given)
        provider.create(given, context)
        changed = sorted(name for name, value in attrs.asdict(given).items() if value != before[name])
        if changed:
            fault(f"making an instance changed its options: {', '.join(changed)}; work on a copy")


def _fault_if(problem: str) -> None:
    if problem:
        fault(problem)
