import pytest

from cosmos_core import __version__
from cosmos_core.plugin.compatibility import core_bounds, incompatibility


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
