import json

import attrs
import pytest

from cosmos_core.errors import ConfigError, PluginNotFoundError
from cosmos_core.protocols import AlgorithmCapabilities, DatasetCapabilities, EngineCapabilities, ModelCapabilities
from cosmos_service_tools.card import declared

REWARD = """
import attrs
from cosmos_core.protocols import Provider, RewardCapabilities, hookimpl

@attrs.frozen(kw_only=True)
class Inner:
    deep: float = attrs.field(default=0.5, metadata={"help": "How deep."})

@attrs.frozen(kw_only=True)
class Options:
    length: int = attrs.field(metadata={"help": "How long."}, validator=attrs.validators.ge(1))
    names: tuple[str, ...] = ("a", "b")
    extra: dict = attrs.field(factory=dict)
    inner: Inner = attrs.field(factory=Inner)
    cap: float | None = None

@hookimpl
def cosmos_reward():
    return Provider(create=dict, options=Options, capabilities=RewardCapabilities())
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Put a plugin `short` of a kind on `sys.path`, in a distribution of its own."""

    def make(name, kind, source, about=""):
        info = tmp_path / name / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (info.parent / f"{name}.py").write_text(source)
        (info / "RECORD").write_text(f"{name}.py,,\n")
        (info / "entry_points.txt").write_text(f"[cosmos_core.{kind}s]\nshort = {name}\n")
        lines = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: cosmos-core>=0.1\n{about}"
        (info / "METADATA").write_text(lines)
        monkeypatch.syspath_prepend(str(info.parent))

    return make


def test_each_capability_has_its_value_and_meaning():
    items = {each.name: each for each in declared(ModelCapabilities(mesh_axes=frozenset({"tp", "cp"})))}
    assert items["payload_kinds"].value == "tokens"
    assert items["mesh_axes"].value == "cp, tp"
    assert items["mesh_axes"].meaning.startswith("Axes of `[policy.mesh]` that may be greater than one;")
    for record in [AlgorithmCapabilities, DatasetCapabilities, EngineCapabilities, ModelCapabilities]:
        assert not [each.name for each in declared(record()) if not each.meaning]
        assert len(declared(record())) == len(attrs.fields(record))
    assert declared(None) == []


def test_a_plugin_is_shown_with_source_capabilities_and_options(cosmos, install, tmp_path):
    urls = "Summary: Short.\nProject-URL: Docs, https://d\nProject-URL: Repository, https://r\n"
    install("shown_a", "reward", REWARD, urls)
    lines = [" ".join(line.split()) for line in cosmos("show", "short").splitlines()]
    assert any(line.startswith("sha256 ") for line in lines)
    for line in (
        "reward short",
        "distribution shown_a 1.0",
        "summary Short.",
        "home page https://r",
        "requires cosmos-core>=0.1",
        "payload_kinds tokens Kinds of payload it can score.",
        "deterministic true Whether the same completion always gets the same score.",
        "length an integer, ≥ 1 required How long.",
        "names an array a, b",
        "inner.deep a number 0.5 How deep.",
        "cap a number none",
    ):
        assert line in lines

    # JSON has all of it.
    shown = json.loads(cosmos("show", "short", "--json"))
    assert (shown["kind"], shown["name"], shown["distribution"], shown["protocol"]) == ("reward", "short", "shown_a", 1)
    assert shown["source"]["location"] == str(tmp_path / "shown_a")
    assert len(shown["sha256"]) == 64
    assert [each["name"] for each in shown["capabilities"]] == ["payload_kinds", "deterministic"]
    (length,) = [option for option in shown["options"] if option["name"] == "length"]
    assert (length["type"], length["bounds"], length["default"]) == ("an integer", "≥ 1", "required")
    assert (length["help"], length["is_dynamic"]) == ("How long.", False)

    # A name may be one of a distribution; the nearest of an unknown one is told; one of two kinds needs its kind.
    assert "reward short" in cosmos("show", "shown_a:short")
    with pytest.raises(PluginNotFoundError, match="did you mean short"):
        cosmos("show", "shrot")
    install("shown_b", "dataset", "")
    with pytest.raises(ConfigError, match="reward and of a dataset plugin; say which with --kind"):
        cosmos("show", "short")
    assert "reward short" in cosmos("show", "short", "--kind", "reward")
