import functools
import runpy
import sys
import types

import pytest

from cosmos_core.api.functions import reference
from cosmos_core.errors import ConfigError
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import Completion, RewardContext
from cosmos_core.types import Prompt

SCRIPT = """
import functools
import math as maths
from collections import Counter
from typing import Any, Final

LIMIT: Final = 40
WEIGHTS = {"long": 0.5}
model = object()


class Words(Counter):
    def most(self) -> int:
        return max(self.values(), default=0)


def repeated(text: str) -> int:
    return Words(text.split()).most()


@functools.lru_cache
def sum(number: float) -> float:  # of the script, whatever Python calls so
    return number + 1


def brevity(prompt: Any, completion: str, *, power: float = 1.0) -> float:
    model = WEIGHTS["long"]
    return sum(maths.pow(model * repeated(completion) / LIMIT, power))


def needs_model(completion):
    return model.score(completion)


def outer():
    def inner(completion):
        return 1.0
    return inner

nested = outer()
short = lambda completion: 1.0
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """What a script has at its top, as if this process were running it."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    module = types.ModuleType("__main__")
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, "__main__", module)
    exec(compile(SCRIPT, str(path), "exec"), vars(module))
    return module


def test_a_function_of_a_script_is_written_with_what_it_needs(script, tmp_path, monkeypatch):
    found = reference(script.brevity, tmp_path)
    assert found == f"{tmp_path}/brevity.py:brevity"
    assert {"needs_model", "model", "outer"}.isdisjoint(runpy.run_path(f"{tmp_path}/brevity.py"))
    monkeypatch.undo()  # the worker's __main__ is another one
    made = PluginSet.load([("reward", found)])
    reward = made.create("reward", found, {"power": 2.0}, RewardContext(name="brevity", seed=0))
    assert reward.score(Completion(prompt=Prompt(text="p"), text="a b a a")) == pytest.approx(1 + (0.5 * 3 / 40) ** 2)


def test_what_cannot_be_written_down_is_refused(script, tmp_path):
    with pytest.raises(ConfigError, match=r"needs_model uses model, <object object .* make it inside of needs_model"):
        reference(script.needs_model, tmp_path)
    homeless = {}
    exec("def made(completion): return 1.0", homeless)
    for wrong in (script.nested, script.short, functools.partial(script.brevity, power=2), len, homeless["made"], 3):
        with pytest.raises(ConfigError, match="not a function or class that stands at the top of a file or a cell"):
            reference(wrong, tmp_path)


def test_a_function_of_a_module_is_named_by_its_file(tmp_path):
    assert reference(test_a_function_of_a_module_is_named_by_its_file, tmp_path).startswith(f"{__file__}:test_a_func")
    assert reference("math", tmp_path) == "math"
