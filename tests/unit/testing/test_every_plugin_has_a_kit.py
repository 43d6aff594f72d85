"""Every plugin of this repository inherits the whole kit of its kind in a test module of its own.

Of the presets of an algorithm's distribution one does; the others are compared with their formulas.
"""

import importlib.metadata
import importlib.util
import inspect
from pathlib import Path

from cosmos_core import testing
from cosmos_core.plugins.discovery import entries
from cosmos_core.plugins.known import KNOWN

ROOT = Path(__file__).parents[3]
PLACES = (
    "plugins/*/*/tests/test_conformance.py",
    "tests/unit/testing/test_*_conformance.py",
    "tests/nightly/contract/test_*_conformance.py",
    "tests/nightly/vllm/test_*_conformance.py",
)
MODULES = [file for place in PLACES for file in ROOT.glob(place)]
KITS = tuple(getattr(testing, name) for name in testing.__all__ if name.endswith("Conformance"))


def classes(file):
    """The test classes of a module that inherit a whole kit."""
    spec = importlib.util.spec_from_file_location(f"conformance_{abs(hash(file))}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = [cls for name, cls in inspect.getmembers(module, inspect.isclass) if name.startswith("Test")]
    return [cls for cls in found if issubclass(cls, KITS)]


def proven():
    return {(cls.kind, cls.plugin) for file in MODULES for cls in classes(file)}


def own():
    """The core's own plugins."""
    text = importlib.metadata.distribution("cosmos-core").read_text("entry_points.txt")
    return [(entry.kind, entry.name) for entry in entries(text)]


def test_every_plugin_has_a_kit():
    found = proven()
    presets = {KNOWN[each] for each in found & KNOWN.keys() if each[0] == "algorithm"}
    expected = {each for each in KNOWN if each[0] != "algorithm" or KNOWN[each] not in presets}
    assert {*expected, *own()} - found == set()
