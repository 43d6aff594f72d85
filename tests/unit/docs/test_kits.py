"""The page about the kits lists each of their tests."""

from pathlib import Path

from reference import kits

from cosmos_core import testing
from cosmos_core.protocols import KINDS

PAGE = (Path(__file__).parents[3] / "docs" / "plugins" / "conformance.md").read_text()


def test_each_kit_is_on_the_page_with_every_test_and_its_reason():
    for kind in KINDS:
        assert f"```{{conformance-kit}} {kind}\n```" in PAGE
        kit = getattr(testing, f"{kind.capitalize()}Conformance")
        text = kits.reference("all") + kits.reference(kind)
        names = [name for name in dir(kit) if name.startswith("test_")]
        assert names
        for name in names:
            assert getattr(kit, name).__doc__, f"{name} does not say why"
            assert text.count(f"| {name.removeprefix('test_').replace('_', ' ')} |") == 1


def test_every_public_name_of_the_testing_package_is_documented():
    rendered = PAGE + "".join(map(kits.reference, KINDS))
    assert [name for name in testing.__all__ if name not in rendered] == []
