"""The tests that plugins of all kinds share: a plugin is found, loads, and has options that teach."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, NoReturn

import attrs
import pytest

from cosmos_core.config.reference import fields
from cosmos_core.config.structure import structure
from cosmos_core.errors import ConfigError, PluginError
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import Kind, Provider
from cosmos_core.types import JSON

_MUTABLE: Final = (list, dict, set, bytearray)


def option_faults(cls: type) -> Iterator[str]:
    """Everything that is wrong with an options class, each as a message for its author."""
    yield from filter(None, (not_frozen(cls), undocumented(cls), shared_defaults(cls)))


def not_frozen(cls: type) -> str:
    """Name the classes that can be written to; empty if none can."""
    loose = [each.__name__ for each in _classes(cls) if not _is_frozen(each)]
    if not loose:
        return ""
    return f"{', '.join(loose)} is not frozen; declare it with @attrs.frozen(kw_only=True)"


def undocumented(cls: type) -> str:
    """Name the options that say nothing of themselves; empty if all do."""
    silent = [name for name, field in fields(cls) if not field.metadata.get("help")]
    if not silent:
        return ""
    return (
        f"options without a help text: {', '.join(silent)}; declare them as "
        "name: type = option(default, help='What it is for.')"
    )


def shared_defaults(cls: type) -> str:
    """Name the options that share one mutable default between all instances; empty if none does."""
    shared = [name for name, field in fields(cls) if isinstance(field.default, _MUTABLE)]
    return f"options whose default is one object for all instances: {', '.join(shared)}; use factory=" if shared else ""


def _classes(cls: type) -> Iterator[type]:
    """An options class and those of the tables in it."""
    yield cls
    for field in attrs.fields(attrs.resolve_types(cls)):
        if isinstance(field.type, type) and attrs.has(field.type):
            yield from _classes(field.type)


def _is_frozen(cls: type) -> bool:
    own = attrs.fields(cls)
    instance: Any = object.__new__(cls)
    try:
        for field in own:
            setattr(instance, field.name, None)
    except attrs.exceptions.FrozenInstanceError:
        return True
    except (TypeError, ValueError, AttributeError):
        # A validator that refuses None was asked, so the attribute can be set.
        return False
    return not own


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
        """The provider that the plugin's hook returned; unset capabilities are the kind's defaults."""
        return plugins.provider(self.kind, self.plugin)

    @pytest.fixture
    def capabilities(self, provider: Provider[Any]) -> Any:
        """The plugin's capabilities."""
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


_INTEGERS: Final = range(-(2**63), 2**64)
_ITERABLES: Final = (tuple, set, frozenset)


def json_problems(value: Any, path: str) -> Iterator[str]:
    """Where a value is no plain JSON, why, and what to write instead.

    Args:
        value: Anything.
        path: Its name in the messages.
    """
    match value:
        case list():
            for index, item in enumerate(value):
                yield from json_problems(item, f"{path}[{index}]")
        case dict():
            for key, item in value.items():
                if not isinstance(key, str):
                    yield f"{path} has the key {key!r}, a {type(key).__name__}; keys are text"
                yield from json_problems(item, f"{path}[{key!r}]")
        case _:
            problem = _scalar_problem(value)
            if problem:
                yield f"{path} is {value!r:.100}, {problem}"


def _scalar_problem(value: Any) -> str:
    match value:
        case bool() | None:
            return ""
        case str():
            return "" if _is_encodable(value) else "text that UTF-8 cannot hold; replace half surrogate pairs"
        case int():
            return "" if value in _INTEGERS else "more than 64 bits; write it as text"
        case float():
            return "" if math.isfinite(value) else "which JSON cannot hold; leave it out, or use None"
        case _:
            wanted = "a list" if isinstance(value, _ITERABLES) else "text, numbers, lists and dicts"
            return f"a {type(value).__name__}; use {wanted}"


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class OneThread(PluginConformance):
    """Sums in one order, the same on every machine of a kind; and tiny tensors are slower on many threads."""

    @pytest.fixture(autouse=True)
    def _one_thread(self) -> Iterator[None]:
        import torch  # noqa: PLC0415 - kits that compute nothing need none

        before = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(before)
