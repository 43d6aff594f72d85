"""Bounds of the core in a distribution's requirements."""

from cosmos_service_check.bounds import core_bounds, core_excess


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
        monkeypatch.setattr("cosmos_service_check.bounds.version", {"cosmos-core": this}.get)
        found = core_excess(requires)
        assert bool(found) == bool(following)
        if following:
            assert f"which admits {following}, a release that it cannot have been tried with" in found
            assert found.endswith(f",<{following}'")
