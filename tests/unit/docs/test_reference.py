"""The generated parts of the documentation follow the code."""

import importlib.util
import inspect
from pathlib import Path

import attrs

from cosmos_core.config import schema
from cosmos_core.protocols import hooks

EXTENSIONS = Path(__file__).parents[3] / "docs" / "extensions"


def reference(name):
    spec = importlib.util.spec_from_file_location(name, EXTENSIONS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.reference()


def test_every_key_of_every_table_is_in_the_reference():
    text = reference("recipe_reference")
    classes = [
        cls for _, cls in inspect.getmembers(schema, inspect.isclass) if attrs.has(cls) and cls is not schema.Recipe
    ]
    assert len(classes) > 15
    for cls in classes:
        assert cls.__doc__ in text
        for field in attrs.fields(cls):
            is_table = "Config" in str(field.type)
            assert is_table or f"| `{field.name}` |" in text, f"{cls.__name__}.{field.name}"


def test_types_bounds_and_defaults_are_written_as_in_toml():
    text = reference("recipe_reference")
    assert '| `mode` | `"async"` or `"sync"` | `"async"` |' in text
    assert "| `top_p` | number, > 0, ≤ 1 | `1.0` |" in text
    assert "| `betas` | array of 2 numbers | `[0.9, 0.95]` |" in text
    assert "| `steps` | integer, ≥ 1 | required |" in text
    assert "| `path` | string | absent |" in text
    assert "| `hooks` | array of strings | `[]` |" in text
    assert "| `durable` | boolean | `false` |" in text
    assert "## `[[reward]]`" in text


def test_every_lifecycle_hook_is_in_the_table():
    text = reference("lifecycle_hooks")
    assert "| `cosmos_step_finished(run, step, metrics)` |" in text
    specs = [name for name in vars(hooks) if name.startswith("cosmos_")]
    providers = {"cosmos_model", "cosmos_algorithm", "cosmos_reward", "cosmos_dataset", "cosmos_engine", "cosmos_hook"}
    assert text.count("| `cosmos_") == len(set(specs) - providers)
