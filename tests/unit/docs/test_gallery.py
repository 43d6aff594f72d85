"""Every option of every first-party plugin is in the gallery, with its exact type and default."""

import enum
import json
import types
import typing

import attrs
import pytest
from reference import gallery

from cosmos_core.plugins.known import KNOWN
from cosmos_core.plugins.selection import PluginSet

ENTRIES = list(gallery.entries())
SCALARS = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}


def type_of(hint):
    """An independent wording of a type, as the gallery must have it."""
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return f"one of {', '.join(json.dumps(each) for each in typing.get_args(hint))}"
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return f"one of {', '.join(json.dumps(each.value) for each in hint)}"
    if origin is tuple:
        return "an array"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_of(each) for each in typing.get_args(hint) if each is not type(None))
    return SCALARS.get(hint, "a table")


def default_of(field):
    if field.default is attrs.NOTHING:
        return "required"
    value = field.default.factory() if isinstance(field.default, attrs.Factory) else field.default
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, tuple) and value and all(isinstance(each, str) for each in value):
        return f"`{', '.join(value)}`"
    return "`none`" if value in (None, ()) else f"`{json.dumps(value, ensure_ascii=False)}`"


def options_of(cls, prefix=""):
    """(name, type, field) of every option; those of a table have its name before theirs."""
    for name, hint in typing.get_type_hints(cls).items():
        if attrs.has(hint):
            yield from options_of(hint, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", hint, getattr(attrs.fields(cls), name)


@pytest.fixture(scope="module")
def text():
    return gallery.reference()


def test_every_first_party_plugin_is_in_the_gallery(text):
    assert {(entry.kind, entry.name) for entry in ENTRIES} >= KNOWN.keys() | {("model", "hf"), ("engine", "embedded")}
    for entry in ENTRIES:
        assert f"### `{entry.name}`\n" in text
        assert f"$ pip install {KNOWN.get((entry.kind, entry.name), '')}" in text.replace('"', "")


def test_every_option_has_its_exact_type_bounds_and_default(text):
    for entry in ENTRIES:
        section = text.partition(f"## {entry.kind.capitalize()}s\n")[2]
        section = section.partition(f"### `{entry.name}`\n")[2].partition("\n### ")[0].partition("\n## ")[0]
        section = section.partition("\n| declares |")[0]
        provider = PluginSet.load([(entry.kind, entry.name)]).provider(entry.kind, entry.name)
        rows = {line.split(" | ")[0].strip("| "): line for line in section.splitlines() if line.startswith("| `")}
        for name, hint, field in options_of(provider.options):
            _, kind, default, help_text = rows[f"`{name}`"].strip("| ").split(" | ", 3)
            for bound in (", ≥", ", >", ", length", ", matches"):
                kind = kind.partition(bound)[0]
            assert kind == type_of(hint)
            whole = default_of(field).replace("|", "\\|")
            # Long ones are cut.
            assert default == whole or (default.endswith("…`") and whole.startswith(default[:-2]))
            said = " ".join(field.metadata["help"].split()).replace("|", "\\|")
            assert help_text == (f"{said} Dynamic." if field.metadata.get("dynamic") else said)
    assert "| `dual_clip` | a number, > 1 | `none` |" in text
    assert "| `stops` | a number, ≥ 0, ≤ 1 | `0.3` |" in text
