from cosmos_core import __version__
from cosmos_core.plugins.compatibility import (
    Unmet,
    incompatibility,
    malformed_requirement,
    unmet_requirements,
)


def test_what_to_upgrade():
    for requirement, remedy in [
        ("cosmos-core>=99,<100", "pip install -U cosmos-core"),
        (f"cosmos-core>{__version__}", "pip install -U cosmos-core"),
        ("cosmos-core~=99.0", "pip install -U cosmos-core"),
        ("cosmos-core<0.0.1", "pip install -U acme"),
        (f"cosmos-core!={__version__}", "pip install -U acme"),
        ("cosmos-core==0.0.*", "pip install -U acme"),
    ]:
        problem = incompatibility("acme", [requirement])
        assert problem.startswith("it requires cosmos-core")
        assert problem.endswith(f"; {remedy}")


def test_a_requirement_without_a_meaning_is_malformed_and_a_version_that_is_none_does_not_do():
    for line in ["???", "acme; os_name ~= '1'", "acme; colour == 'red'"]:
        assert malformed_requirement(["attrs", line]) == f"its metadata has a malformed requirement, {line!r}"
        assert not unmet_requirements([line], {})
    (unmet,) = unmet_requirements(["NumPy>=1; python_version > '3'"], {"numpy": "abc"})
    assert unmet == Unmet("NumPy>=1 is required, abc is installed", "NumPy>=1", is_absent=False)
