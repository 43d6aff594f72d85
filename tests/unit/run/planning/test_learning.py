"""What planning says of algorithms that blend predictions, or imitate demonstrations beside rollouts."""

import attrs

from cosmos_core.protocols import (
    AlgorithmCapabilities,
    DatasetCapabilities,
    EngineCapabilities,
    ModelCapabilities,
    Preflight,
    RewardCapabilities,
)
from cosmos_core.protocols.frozen import Blend
from cosmos_core.run.planning.parts import Measured
from tests.unit.run.planning.test_checks import check, teacher

LATENTS = frozenset({"latents"})


def test_blends_take_both_model_plugins():
    able, unable = ModelCapabilities(blends=True), ModelCapabilities()
    asks = {"consults": {1: {"teacher": Blend(shares=(0.5,))}}}
    other = teacher(plugin="other", capabilities=able, vocab_size=7)
    assert check(**asks, model=able, frozen={"teacher": other}) == []
    (problem,) = check(**asks, model=unable, frozen={"teacher": other})
    assert "'grpo' blends the policy's predictions with those of the teacher, and model plugin 'hf' does not" in problem
    (problem,) = check(**asks, model=able, frozen={"teacher": teacher(plugin="other", capabilities=unable)})
    assert "model plugin 'other' does not (`ModelCapabilities.blends`)" in problem

    # The average of the policy needs no other plugin.
    asks = {"consults": {1: {"average": Blend(shares=(1.0,))}}}
    assert check(**asks, model=ModelCapabilities(blends=True)) == []
    (problem,) = check(**asks, model=ModelCapabilities())
    assert "those of the average" in problem


def test_who_imitates_beside_rollouts_needs_demonstrations():
    for parts, said in [
        ({"dataset": DatasetCapabilities()}, "the rows of dataset 'numbers' have none"),
        (
            {"measured": Measured(num_rows=10, num_demonstrations=0, shortest_prompt=9, longest_prompt=20)},
            "none of 10 train rows of dataset 'numbers' has one",
        ),
    ]:
        without = {"warmup": None}
        found = check(without, imitates={0: 1}, **parts)
        assert any(
            "algorithm.plugin: 'grpo' imitates demonstrations beside rollouts" in each and said in each
            for each in found
        )
        assert check(without, **parts) == []


def latents(**algorithm):
    """Parts of a run whose decisions are latents."""
    return {
        "model": ModelCapabilities(payload_kinds=LATENTS),
        "engine": EngineCapabilities(payload_kinds=LATENTS),
        "main": AlgorithmCapabilities(payload_kinds=LATENTS, **algorithm),
        "rewards": [RewardCapabilities(payload_kinds=LATENTS)],
    }


def test_latents_have_no_context_and_no_units_to_limit():
    # Latents have no context that could be too short.
    changes = {
        "warmup": None,
        "policy": {"optimizer": {"lr": 1e-6}, "micro_batch_units": 2},
        "rollout": {"sampling": {"max_units": 300}},
    }
    assert check(changes, **latents()) == []
    assert len(check(changes)) > 0

    # Prompts for latents have no units to limit.
    for name in ["min_prompt_units", "max_prompt_units"]:
        changes = {"warmup": None, "dataset": {"plugin": "numbers", name: 3}}
        measured = Measured(num_rows=10, num_demonstrations=4, shortest_prompt=0, longest_prompt=0, num_unfit=10)
        (problem,) = check(changes, **latents(), measured=measured)
        assert problem.startswith(f"dataset.{name}: 3, but prompts of model plugin 'hf' have no units")

    # A frozen world model is told what differs.
    frozen = {"reference": attrs.evolve(teacher(), misfit="train row 0 has another 'text' for it than for the policy")}
    (problem,) = check({"warmup": None}, **latents(), frozen=frozen)
    assert problem == (
        "reference: train row 0 has another 'text' for it than for the policy; it needs the policy's text encoder, "
        "autoencoder and size of videos"
    )


def test_what_is_priced_and_rendered_is_what_is_made():
    # Every stage prices what the model makes.
    warmup = AlgorithmCapabilities(source="demonstrations", payload_kinds=frozenset({"tokens"}))
    (problem,) = check(**latents(), warmup=warmup)
    assert problem == (
        "warmup.plugin: 'sft' prices payloads of kind tokens, and model plugin 'hf' makes latents; take another "
        "algorithm, or another model"
    )
    assert check(**latents(), warmup=AlgorithmCapabilities(source="demonstrations")) == []

    # Decisions that an algorithm takes for others are refused.
    for made, priced in [("regressions", "transitions"), ("transitions", "regressions")]:
        preflight = Preflight(decisions=made, decisions_key="rollout.engine.options.regressions")
        changes = {"warmup": None}
        (problem,) = check(changes, **latents(decisions=frozenset({priced})), preflight=preflight)
        assert problem.startswith(
            "rollout.engine.options.regressions: with these options engine 'embedded' makes " + made
        )
        assert f"'grpo' prices {priced}" in problem
        assert check(changes, **latents(decisions=frozenset({made})), preflight=preflight) == []
        assert check(changes, **latents(decisions=frozenset({priced}))) == [], (
            "an engine that says nothing is asked nothing"
        )

    # Rewards that look at media need an engine that renders.
    for renders in [False, True]:
        found = check(
            {"warmup": None},
            model=ModelCapabilities(payload_kinds=LATENTS),
            engine=EngineCapabilities(payload_kinds=LATENTS, renders=renders),
            rewards=[RewardCapabilities(payload_kinds=frozenset({"media"}))],
        )
        assert [each for each in found if "reward" in each] == ([] if renders else found)
        assert bool(found) != renders
