"""The reference of the recipe follows the schema."""

import inspect

import attrs
from reference.recipe import reference

from cosmos_core.config import schema


def test_every_key_is_in_the_reference_as_in_toml():
    text = reference()
    classes = [
        cls for _, cls in inspect.getmembers(schema, inspect.isclass) if attrs.has(cls) and cls is not schema.Recipe
    ]
    assert len(classes) > 15
    for cls in classes:
        assert cls.__doc__ in text
        for field in attrs.fields(cls):
            is_table = "Config" in str(field.type)
            assert is_table or f"| `{field.name}` |" in text, f"{cls.__name__}.{field.name}"
    assert '| `mode` | `"async"` or `"sync"` | `"async"` |' in text
    assert "| `top_p` | number, > 0, ≤ 1 | `1.0` |" in text
    assert "| `betas` | array of 2 numbers | `[0.9, 0.95]` |" in text
    assert "| `steps` | integer, ≥ 1 | required |" in text
    assert "| `path` | string | absent |" in text
    assert "| `hooks` | array of strings | `[]` |" in text
    assert "| `durable` | boolean | `false` |" in text
    assert "## `[[reward]]`" in text
