"""Faults of what models say besides log-probs: divergences from a frozen model, and features."""

import pytest

from tests.nightly.kit.faulty_family import COMPARING_TESTS, TINY, family, only, unnamed

pytestmark = pytest.mark.slow

DECLARED = 'CAPABILITIES = ModelCapabilities(divergences=frozenset({"forward-kl", "jsd"}), features=True)'


def asked(line):
    """A `decide` that is asked for all there is, and spoils what the family's own says."""
    return family(
        f"""
        def decide(self, module, batch, *, temperature, prediction_for=None, kl_target=None, with_features=False, **kw):
            asked = kw | {{"prediction_for": prediction_for, "kl_target": kl_target, "with_features": with_features}}
            decided = super().decide(module, batch, temperature=temperature, **asked)
            {line}
            return decided
        """,
        DECLARED,
    )


def apart(expression):
    return asked(
        "own = decided.divergence_N; "
        f"decided = decided if own is None else attrs.evolve(decided, divergence_N={expression})"
    )


FAULTS = {
    "offset": (
        apart("own + 0.1"),
        "test_divergences_are_distances_that_their_gradient_shortens",
        "away from the very same distribution",
    ),
    "negative": (
        apart("own - 2.0 * (own > 1e-3) * own"),
        "test_divergences_are_distances_that_their_gradient_shortens",
        "away from those of other weights",
    ),
    "nothing": (
        apart("own * 0.0"),
        "test_divergences_are_distances_that_their_gradient_shortens",
        "from those of other weights",
    ),
    "summed": (
        apart("own.sum()"),
        "test_divergences_are_distances_that_their_gradient_shortens",
        "is torch.float32 [], expected finite torch.float32 [",
    ),
    "top-ignored": (
        asked(
            "scale = 1.0 if kl_target is None or kl_target.comparison.top is None else 9.0; "
            "own = decided.divergence_N; "
            "decided = decided if own is None else attrs.evolve(decided, divergence_N=own * scale)"
        ),
        "test_divergences_are_distances_that_their_gradient_shortens",
        "with top = 3 is larger",
    ),
    "detached": (
        apart("own.detach()"),
        "test_divergences_are_distances_that_their_gradient_shortens",
        "carries no gradient",
    ),
    "away": (
        apart("2.0 * own.detach() - own"),
        "test_divergences_are_distances_that_their_gradient_shortens",
        "a small step against its gradient takes it from",
    ),
    "unasked": (
        asked("decided = attrs.evolve(decided, divergence_N=decided.logprobs_N)"),
        "test_what_is_asked_for_is_given_and_nothing_else",
        "decide({}) gave divergence_N, logprobs_N; give",
    ),
    "mixed-up": (
        apart("own.flip(0)"),
        "test_divergences_are_distances_that_their_gradient_shortens",
        "changes with what else is packed",
    ),
    "no-features": (
        asked("decided = attrs.evolve(decided, features_ND=None)"),
        "test_what_is_asked_for_is_given_and_nothing_else",
        "gave logprobs_N; give log-probs and what is asked for",
    ),
    "frozen-features": (
        asked(
            "own = decided.features_ND; "
            "decided = decided if own is None else attrs.evolve(decided, features_ND=own.detach())"
        ),
        "test_what_is_asked_for_is_given_and_nothing_else",
        "features_ND of decide({'with_features': True}) carries no gradient",
    ),
}


ONE_SET = """
def build(self, *, seed, dtype, device, layout=None):
    return super().build(seed=7, dtype=dtype, device=device, layout=layout)
"""
# A checkpoint has one set of weights, whatever the seed.
GOOD = {"good-comparing": asked("pass"), "of-a-checkpoint": family(ONE_SET, DECLARED)}


@pytest.fixture(scope="module")
def outcomes(run_kit):
    modules = {**GOOD, **{name: source for name, (source, *_) in FAULTS.items()}}
    bodies = {name: only(test) for name, (_, test, _) in FAULTS.items()}
    bodies |= dict.fromkeys(GOOD, only(*COMPARING_TESTS))
    return run_kit("model", modules, header=TINY, body="config = TINY\n", bodies=bodies)


def test_a_good_model_passes_whatever_its_seed_does(outcomes):
    for name in GOOD:
        said = {each.test: (each.result, each.message) for each in outcomes[name] if each.test in COMPARING_TESTS}
        assert said == dict.fromkeys(COMPARING_TESTS, ("passed", "")), name


def test_every_fault_is_named(outcomes):
    assert unnamed(outcomes, FAULTS) == {}


def test_every_test_of_what_is_compared_can_fail():
    assert {test for _, test, _ in FAULTS.values()} == COMPARING_TESTS
