"""Everything that the protocols declare is documented, as the source declares it."""

import ast
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import attrs
from reference import kinds, markdown, signatures

from cosmos_core import protocols
from cosmos_core.protocols import KINDS, PROTOCOL_VERSIONS, provider

PLUGINS = Path(__file__).parents[3] / "docs" / "plugins"
MODULES = {kind: importlib.import_module(f"cosmos_core.protocols.{kind}") for kind in KINDS if kind != "hook"}


def methods(module):
    """(class, name, signature on one line) of every method of the module's protocols, from its source."""
    for cls in ast.parse(inspect.getsource(module)).body:
        if isinstance(cls, ast.ClassDef) and [ast.unparse(base) for base in cls.bases] == ["Protocol"]:
            for node in cls.body:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    result = ast.unparse(node.returns)
                    begin = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
                    yield cls.name, node, f"{begin} {node.name}({ast.unparse(node.args)}) -> {result}"


def on_one_line(text):
    """Declarations that are broken over lines, joined."""
    return re.sub(
        r"\(\n    (.*?),\n\)", lambda match: "(" + re.sub(r",\s+", ", ", match[1]) + ")", text, flags=re.DOTALL
    )


def test_every_method_of_a_kind_has_its_exact_signature_and_text():
    for kind, module in MODULES.items():
        text = kinds.reference(kind)
        found = list(methods(module))
        assert found
        for cls, node, signature in found:
            assert f"### `{cls}`" in text
            # The standard library writes defaults without the spaces.
            assert signature in on_one_line(text).replace(" = ", "="), f"{cls}.{node.name}"
            assert ast.get_docstring(node).splitlines()[0] in text


def test_every_record_of_a_kind_has_its_fields_with_types_and_meanings():
    for kind in KINDS:
        text = kinds.reference(kind)
        assert " at 0x" not in text
        module = MODULES.get(kind, protocols.hooks)
        own = [cls for cls in vars(module).values() if inspect.isclass(cls) and cls.__module__ == module.__name__]
        for cls in filter(attrs.has, own):
            assert f"### `{cls.__name__}`" in text
            written = inspect.get_annotations(cls)
            assert written.keys() == {field.name for field in attrs.fields(cls)}
            for name, hint in written.items():
                assert f"| `{name}` | `{hint}` |".replace(" | None", " \\| None") in text, cls.__name__


def test_errors_results_and_defaults_are_told():
    text = kinds.reference("engine")
    assert "- raises `WeightSyncError`: The slices written do not cover the layout; nothing was copied." in text
    assert "- returns The digest of what is now loaded" in text
    assert "| `seeded` | `bool` | `True` | Whether a request's draws depend on its seed alone, with any " in text
    assert "`PauseMode` is `Literal['keep', 'abort', 'wait']`." in text
    assert "| `payload_kinds` | `frozenset[str]` | `{'tokens'}` |" in text
    assert "| `token-mean` | Sum over decisions / number of decisions. |" in kinds.reference("algorithm")


def test_tables_and_declarations_are_laid_out_to_be_read():
    async def later(waiting: "int" = 3) -> "None": ...

    def long(self, *, first_argument: "dict[str, list[int]]", second_argument: "dict[str, int]") -> "list[int]": ...

    assert signatures.declaration(later) == "async def later(waiting: int = 3) -> None"
    assert signatures.declaration(long).splitlines() == [
        "def long(",
        "    self,",
        "    *,",
        "    first_argument: dict[str, list[int]],",
        "    second_argument: dict[str, int],",
        ") -> list[int]",
    ]
    assert markdown.table(("a", "b", "c"), [("1", "", "x | y"), ("2", "", "")]).splitlines() == [
        "| a | c |",
        "| --- | --- |",
        "| 1 | x \\| y |",
        "| 2 |  |",
    ]


def test_every_public_name_is_documented():
    pages = "\n".join(page.read_text() for page in PLUGINS.rglob("*.md"))
    everything = "\n".join([pages, *(kinds.reference(kind) for kind in KINDS)])
    found = pkgutil.iter_modules(protocols.__path__, "cosmos_core.protocols.")
    modules = [importlib.import_module(each.name) for each in found]
    declared = {
        name
        for module in modules
        for name, value in vars(module).items()
        if inspect.isclass(value) or inspect.isfunction(value)
        if not name.startswith("_") and value.__module__ == module.__name__
    }
    names = sorted({*protocols.__all__, *declared})
    assert [name for name in names if not re.search(rf"`[^`\n]*\b{name}\b", everything)] == []


def test_every_protocol_version_is_listed(monkeypatch):
    text = kinds.versions()
    for kind, version in PROTOCOL_VERSIONS.items():
        assert f"| [{kind}](/plugins/{kind}.md) | {version} | none |" in text
    monkeypatch.setitem(provider.DEPRECATED_PROTOCOLS, "reward", {0: "9.9"})
    assert "| 0, until cosmos-core 9.9 refuses it |" in kinds.versions()
