"""The tests that plugins of all kinds share: a plugin is found, loads, and has options that teach."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Final, NoReturn, TypeAlias

import attrs
import pytest

from cosmos_core.config.structure import fields, structure
from cosmos_core.errors import PluginError
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import Kind, Provider
from cosmos_core.types import JSON

Make: TypeAlias = Callable[..., Any]
"""Makes an instance of the plugin: `make()`, or `make(option=value)` to change some of `options`."""
_MUTABLE: Final = (list, dict, set, bytearray)


def option_faults(cls: type) -> Iterator[str]:
    """Everything that is wrong with an options class, each as a message for its author."""
    if loose := [each.__name__ for each in _classes(cls) if not _is_frozen(each)]:
        yield f"{', '.join(loose)} is not frozen; declare it with @attrs.frozen(kw_only=True)"
    if silent := [name for name, field in fields(cls) if not field.metadata.get("help")]:
        yield (
            f"options without a help text: {', '.join(silent)}; declare them as "
            "name: type = option(default, help='What it is for.')"
        )
    if shared := [name for name, field in fields(cls) if isinstance(field.default, _MUTABLE)]:
        yield f"options whose default is one object for all instances: {', '.join(shared)}; use factory="


def _classes(cls: type) -> Iterator[type]:
    """An options class and those of the tables in it."""
    yield cls
    for field in attrs.fields(attrs.resolve_types(cls)):
        if isinstance(field.type, type) and attrs.has(field.type):
            yield from _classes(field.type)


def _is_frozen(cls: type) -> bool:
    instance: Any = object.__new__(cls)
    try:
        instance.any = None
    except AttributeError as error:
        return isinstance(error, attrs.exceptions.FrozenInstanceError) or not attrs.fields(cls)
    return not attrs.fields(cls)


def fault(message: str) -> NoReturn:
    """Fail the test with a message for the plugin's author: what is wrong, the value seen, what to do."""
    pytest.fail(message, pytrace=False)


def fault_if(problems: Iterable[str]) -> None:
    """Fail the test with all of these messages that are not empty, if there are any."""
    if found := [each for each in problems if each]:
        fault("\n".join(found))


def needs(declared: object, name: str) -> None:
    """Skip the test of what the plugin does not declare."""
    if not declared:
        pytest.skip(f"not declared: {name}")


@contextlib.contextmanager
def told_by(where: str) -> Iterator[None]:
    """Skip the test at a fault that another one tells of: what one test says need not be said by all."""
    try:
        yield
    except pytest.fail.Exception:
        pytest.skip(f"see {where}")


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
    def make(self, plugins: PluginSet, options: Mapping[str, JSON], context: Any) -> Make:
        """A function that makes an instance."""

        def create(**changes: JSON) -> Any:
            return plugins.create(self.kind, self.plugin, {**options, **changes}, context)

        return create

    @pytest.fixture(autouse=True)
    def _one_thread(self) -> Iterator[None]:
        """Sums in one order, the same on every machine of a kind; and tiny tensors are slower on many threads."""
        torch = sys.modules.get("torch")
        if torch is None:
            yield
            return
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(before)

    def test_it_is_found_and_made_of_options_that_teach(
        self, plugins: PluginSet, provider: Provider[Any], options: Mapping[str, JSON], make: Make, context: Any
    ) -> None:
        """`cosmos plugins show` tells what each option is for; every process makes an instance of the same options."""
        record = plugins.record(self.kind, self.plugin)
        problems = [*option_faults(provider.options)]
        if record.status not in ("ok", "conflict"):
            problems.append(f"{self.kind} {record.name} of {record.distribution} is {record.status}: {record.problem}")
        # `cosmos set` changes options of algorithms, and of nothing else.
        named = [name for name, field in fields(provider.options) if field.metadata.get("dynamic")]
        if named and self.kind != "algorithm":
            problems.append(f"options that are dynamic: {', '.join(named)}; only those of algorithms can be")
        fault_if(problems)
        first, second = make(), make()
        if first is second:
            fault("Provider.create returned the same object twice; make a new instance at each call")
        given: Any = structure(options, provider.options, f"{self.kind}.options")
        before = attrs.asdict(given)
        provider.create(given, context)
        if changed := sorted(name for name, value in attrs.asdict(given).items() if value != before[name]):
            fault(f"making an instance changed its options: {', '.join(changed)}; work on a copy")


def json_problem(value: Any, path: str) -> str:
    """A message that says where the value at `path` is no plain JSON, and what to write instead; empty if it is."""
    if odd := [key for key in value if not isinstance(key, str)] if isinstance(value, dict) else []:
        return f"{path} has the key {odd[0]!r}, a {type(odd[0]).__name__}; keys are text"
    if value and isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return next(filter(None, (json_problem(item, f"{path}[{key!r}]") for key, item in items)), "")
    if isinstance(value, int) and value not in range(-(2**63), 2**64):
        return f"{path} is {value!r:.100}, more than 64 bits; write it as text"
    wanted = "give text, numbers, lists and dicts whose keys are text"
    try:
        read = json.loads(json.dumps(value, allow_nan=False, ensure_ascii=False).encode())
    except (TypeError, ValueError) as error:
        return f"{path} is {value!r:.100}, which JSON cannot hold: {error}; {wanted}"
    return "" if read == value else f"{path} is {value!r:.100}, and as JSON {read!r:.100}; {wanted}"
