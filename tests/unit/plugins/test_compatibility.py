import pytest

from cosmos_core import __version__
from cosmos_core.plugins.compatibility import (
    core_bounds,
    core_excess,
    incompatibility,
    malformed_requirement,
    unmet_requirements,
)


@pytest.mark.parametrize(
    ("requirement", "remedy"),
    [
        ("cosmos-core>=99,<100", "pip install -U cosmos-core"),
        (f"cosmos-core>{__version__}", "pip install -U cosmos-core"),
        ("cosmos-core~=99.0", "pip install -U cosmos-core"),
        ("cosmos-core<0.0.1", "pip install -U acme"),
        (f"cosmos-core!={__version__}", "pip install -U acme"),
        ("cosmos-core==0.0.*", "pip install -U acme"),
    ],
)
def test_what_to_upgrade(requirement, remedy):
    problem = incompatibility("acme", [requirement])
    assert problem.startswith("it requires cosmos-core")
    assert problem.endswith(f"; {remedy}")


@pytest.mark.parametrize(
    ("requires", "problem"),
    [
        (["cosmos-core>=0.1,<0.2"], ""),
        (["cosmos-core~=0.1.0"], ""),
        (["Cosmos_Core==0.1.*"], ""),
        ([], "it does not require cosmos-core; add"),
        (["cosmos-core-extra>=1,<2"], "it does not require cosmos-core"),
        (["cosmos-core>=0.1; extra == 'x'"], "it does not require cosmos-core"),
        (["cosmos-core"], "without a lower and an upper bound; write 'cosmos-core>="),
        (["cosmos-core>=0.1"], "without an upper bound"),
        (["cosmos-core<0.2"], "without a lower bound"),
    ],
)
def test_the_core_is_required_with_both_bounds(requires, problem):
    found = core_bounds(requires)
    assert problem in found
    assert bool(found) == bool(problem)


@pytest.mark.parametrize(
    ("requires", "this", "following"),
    [
        (["cosmos-core>=0.1,<0.2"], "0.1.3", ""),
        (["cosmos-core~=0.1.0"], "0.1.3", ""),
        (["cosmos-core>=0.1,<0.3"], "0.2.0", ""),
        (["cosmos-core>=1.2,<2"], "1.2.0", ""),
        ([], "0.1.0", ""),
        (["cosmos-core>=0.1,<1"], "0.1.3", "0.2"),
        (["cosmos-core~=0.1"], "0.1.3", "0.2"),
        (["cosmos-core>=0.1,<=0.2"], "0.1.3", "0.2"),
        (["cosmos-core>=1.2,<3"], "1.2.0", "2.0"),
    ],
)
def test_an_upper_bound_ends_before_the_next_release_that_may_break(monkeypatch, requires, this, following):
    monkeypatch.setattr("cosmos_core.plugins.compatibility.__version__", this)
    found = core_excess(requires)
    assert bool(found) == bool(following)
    if following:
        assert f"which admits {following}, a release that it cannot have been tried with" in found
        assert found.endswith(f",<{following}'")


@pytest.mark.parametrize("line", ["???", "acme; os_name ~= '1'", "acme; colour == 'red'"])
def test_a_requirement_without_a_meaning_is_malformed(line):
    assert malformed_requirement(["attrs", line]) == f"its metadata has a malformed requirement, {line!r}"
    assert not unmet_requirements([line], {})


def test_an_installed_version_that_is_none_does_not_do():
    assert "numpy>=1 is required, abc is installed" in unmet_requirements(["NumPy>=1"], {"numpy": "abc"}).lower()
