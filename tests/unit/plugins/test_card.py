import attrs

from cosmos_core.plugins.card import declared
from cosmos_core.protocols import AlgorithmCapabilities, DatasetCapabilities, EngineCapabilities, ModelCapabilities


def test_each_item_has_its_value_and_meaning():
    items = {each.name: each for each in declared(ModelCapabilities(mesh_axes=frozenset({"tp", "cp"})))}
    assert items["payload_kinds"].value == "tokens"
    assert items["mesh_axes"].value == "cp, tp"
    assert items["mesh_axes"].meaning.startswith("Axes of `[policy.mesh]` that may be greater than one;")


def test_every_item_of_the_protocols_has_a_meaning():
    for record in [AlgorithmCapabilities, DatasetCapabilities, EngineCapabilities, ModelCapabilities]:
        empty = [each.name for each in declared(record()) if not each.meaning]
        assert not empty
        assert len(declared(record())) == len(attrs.fields(record))
    assert declared(None) == []
