from cosmos_core import __version__
from cosmos_core.plugins.compatibility import (
    core_bounds,
    core_excess,
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


def test_the_core_is_required_with_both_bounds():
    for requires, problem in [
        (["cosmos-core>=0.1,<0.2"], ""),
        (["cosmos-core~=0.1.0"], ""),
        (["Cosmos_Core==0.1.*"], ""),
        ([], "it does not require cosmos-core; add"),
        (["cosmos-core-extra>=1,<2"], "it does not require cosmos-core"),
        (["cosmos-core>=0.1; extra == 'x'"], "it does not require cosmos-core"),
        (["cosmos-core"], "without a lower and an upper bound; write 'cosmos-core>="),
        (["cosmos-core>=0.1"], "without an upper bound"),
        (["cosmos-core<0.2"], "without a lower bound"),
    ]:
        found = core_bounds(requires)
        assert problem in found
        assert bool(found) == bool(problem)


def test_an_upper_bound_ends_before_the_next_release_that_may_break(monkeypatch):
    for requires, this, following in [
        (["cosmos-core>=0.1,<0.2"], "0.1.3", ""),
        (["cosmos-core~=0.1.0"], "0.1.3", ""),
        (["cosmos-core>=0.1,<0.3"], "0.2.0", ""),
        (["cosmos-core>=1.2,<2"], "1.2.0", ""),
        ([], "0.1.0", ""),
        (["cosmos-core>=0.1,<1"], "0.1.3", "0.2"),
        (["cosmos-core~=0.1"], "0.1.3", "0.2"),
        (["cosmos-core>=0.1,<=0.2"], "0.1.3", "0.2"),
        (["cosmos-core>=1.2,<3"], "1.2.0", "2.0"),
    ]:
        monkeypatch.setattr("cosmos_core.plugins.compatibility.__version__", this)
        found = core_excess(requires)
        assert bool(found) == bool(following)
        if following:
            assert f"which admits {following}, a release that it cannot have been tried with" in found
            assert found.endswith(f",<{following}'")


def test_a_requirement_without_a_meaning_is_malformed_and_a_version_that_is_none_does_not_do():
    for line in ["???", "acme; os_name ~= '1'", "acme; colour == 'red'"]:
        assert malformed_requirement(["attrs", line]) == f"its metadata has a malformed requirement, {line!r}"
        assert not unmet_requirements([line], {})
    assert "numpy>=1 is required, abc is installed" in unmet_requirements(["NumPy>=1"], {"numpy": "abc"}).lower()
