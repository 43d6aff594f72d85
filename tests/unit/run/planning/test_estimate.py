import attrs

from cosmos_core.config.loading import recipe_from
from cosmos_core.protocols import EngineCapabilities, ModelFacts, Preflight
from cosmos_core.protocols.facts import ModelPart
from cosmos_core.run.planning.footprint import size
from cosmos_core.run.planning.memory import longest_sample, policy_memory, rollout_memory, version_bytes
from cosmos_core.run.planning.processes import gpus, processes

FACTS = ModelFacts(
    architecture="Tiny",
    num_parameters=1000,
    num_layers=2,
    hidden_size=8,
    vocab_size=30,
    tokenizer_size=30,
    context_length=64,
    stop_ids=frozenset(),
    pad_id=0,
)


def recipe(**changes):
    base = {
        "run": {"name": "demo", "steps": 1},
        "model": {"plugin": "hf", "path": "x"},
        "algorithm": {"plugin": "grpo"},
        "policy": {"optimizer": {"lr": 1e-6}},
        "dataset": {"plugin": "numbers"},
    }
    return recipe_from({**base, **changes})


def test_memory_of_a_rollout_replica_by_hand():
    made = recipe(rollout={"precision": "bf16", "max_in_flight": 3, "sampling": {"max_units": 10}})
    parts = rollout_memory(made, FACTS, 20, EngineCapabilities())
    assert parts["parameters"] == 2000
    assert parts["KV cache (at most)"] == 2 * 2 * 8 * 2 * 30 * 3
    longer = rollout_memory(made, attrs.evolve(FACTS, context_length=15), 20, EngineCapabilities())
    assert longer["KV cache (at most)"] == 2 * 2 * 8 * 2 * 15 * 3

    # In pages, whole ones and one beside them; graphs keep what is computed in between.
    paged = EngineCapabilities(cache_page=16, replays_steps=True)
    parts = rollout_memory(made, FACTS, 20, paged)
    assert parts["KV cache (at most)"] == 2 * 2 * 8 * 2 * (32 * 3 + 16)
    assert parts["decode graphs (estimate)"] == parts["logits (estimate)"] > 0
    settings = {"precision": "bf16", "max_in_flight": 3, "sampling": {"max_units": 10}, "device": "cpu"}
    parts = rollout_memory(recipe(rollout=settings), FACTS, 20, paged)
    assert parts["KV cache (at most)"] == 2 * 2 * 8 * 2 * 30 * 3
    assert "decode graphs (estimate)" not in parts

    # A models own cache is taken.
    made = recipe(rollout={"precision": "bf16", "max_in_flight": 3, "sampling": {"max_units": 10}})
    parts = rollout_memory(made, attrs.evolve(FACTS, cache_size=5), 20, EngineCapabilities())
    assert parts["KV cache (at most)"] == 5 * 2 * 30 * 3

    # An engine that denoises has latents in flight in place of a cache.
    made = recipe(rollout={"precision": "bf16", "max_in_flight": 3, "sampling": {"max_units": 10}})
    found = rollout_memory(made, attrs.evolve(FACTS, vocab_size=0, latent_size=500), 0, EngineCapabilities())
    assert found == {"parameters": 2000, "latents in flight": 4 * 4 * 500 * 3}

    # A dialogue may fill what is trained on.
    # Observations are bounded by the micro-batch and the context, not by what the model may say.
    settings = {"rollout": {"precision": "bf16", "max_in_flight": 3, "sampling": {"max_units": 10}}}
    plain, talks = (
        recipe(**settings),
        recipe(**settings, environment={"plugin": "game"}, policy={"optimizer": {"lr": 1e-6}, "micro_batch_units": 50}),
    )
    assert (longest_sample(plain, 64, 20), longest_sample(talks, 64, 20), longest_sample(talks, 40, 20)) == (30, 50, 40)
    kept = "prefix cache (at most)"
    told = Preflight(kept_share=0.5)
    assert kept not in rollout_memory(plain, FACTS, 20, EngineCapabilities(), told)
    parts = rollout_memory(talks, FACTS, 20, EngineCapabilities(), told)
    assert (parts["KV cache (at most)"], parts[kept]) == (2 * 2 * 8 * 2 * 50 * 3, 2 * 2 * 8 * 2 * 25 * 3)

    # An engine may have less than all need at once; what fits into it is no more than they need.
    for most, expected in [(5000, 5000), (9600, 9600), (9601, 9600)]:
        parts = rollout_memory(talks, FACTS, 20, EngineCapabilities(), Preflight(cache_bytes=most))
        assert parts["KV cache (at most)"] == expected


def test_bytes_of_a_weight_sync():
    for precision, expected in [("fp32", 4000), ("bf16", 2000)]:
        assert version_bytes(recipe(rollout={"precision": precision}), FACTS) == expected

    # Matrices are sent as codes and scales.
    facts = attrs.evolve(FACTS, matrices={"a": (8, 40), "b": (2, 4, 64)})
    others = 2 * (1000 - 8 * 40 - 2 * 4 * 64)
    expected = {
        "none": 2000,
        "fp8": others + 8 * 40 + 4 * 8 + 8 * 64 + 4 * 8,
        "mxfp8": others + 8 * 40 + 8 * 2 + 8 * 64 + 8 * 2,
        "mxfp4": others + 8 * 20 + 8 * 2 + 8 * 32 + 8 * 2,
        "nvfp4": others + 8 * 20 + 8 * 3 + 4 + 8 * 32 + 8 * 4 + 2 * 4,
    }
    for quantization, nbytes in expected.items():
        made = recipe(rollout={"precision": "bf16", "quantization": quantization})
        assert version_bytes(made, facts) == nbytes
        parts = rollout_memory(made, facts, 20, EngineCapabilities())
        assert parts["parameters"] + parts.get("codes and scales", 0) == 2000 + (nbytes - others) * (nbytes != 2000)
        (rank,) = policy_memory(made, facts)
        assert rank.host["published weights"] == 2 * nbytes


def test_the_process_table_names_everyone():
    made = recipe(
        policy={"optimizer": {"lr": 1e-6}, "replicas": 2, "mesh": {"tp": 2, "dp_shard": 3}},
        rollout={"replicas": 2, "device": "cpu"},
    )
    assert processes(made, uses_rollouts=True) == [
        ("controller", "cosmos_core.control", "cpu", 1),
        ("policy-0", "cosmos_core.policy", "auto", 6),
        ("policy-1", "cosmos_core.policy", "auto", 6),
        ("rollout-0", "cosmos_core.rollout", "cpu", 1),
        ("rollout-1", "cosmos_core.rollout", "cpu", 1),
    ]
    assert len(processes(made, uses_rollouts=False)) == 3
    assert gpus(made, uses_rollouts=True) == 12
    assert gpus(made, uses_rollouts=False) == 12

    # Sizes are for people.
    assert [size(number) for number in (0, 1023, 1536, 3 << 30, 5 << 50)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "3.0 GiB",
        "5120.0 TiB",
    ]


def test_processes_of_a_rollout_replica_share_weights_and_heads():
    part = ModelPart(
        name="layers",
        num_parameters=450,
        count=2,
        num_expert_parameters=100,
        num_whole_parameters=10,
        head_parameters={2: 40},
    )
    facts = attrs.evolve(FACTS, parts=(part,))
    sizes = {}
    for tp in (1, 2, 4):
        made = recipe(rollout={"precision": "bf16", "max_in_flight": 3, "mesh": {"tp": tp}})
        sizes[tp] = rollout_memory(made, facts, 20, EngineCapabilities())
    # Split are 2 · (450 - 10 whole) of 1000, experts too; with 4 processes, 2 · 40 of the 2 heads are whole as well.
    assert [sizes[tp]["parameters"] for tp in (1, 2, 4)] == [2000, 2 * (1000 - 440), 2 * (1000 - 800 * 3 // 4)]
    whole = sizes[1]["KV cache (at most)"]
    assert [sizes[tp]["KV cache (at most)"] for tp in (2, 4)] == [whole / 2, whole / 2]
    # What heads are made of is whole on each process of an engine that caches it.
    facts = attrs.evolve(facts, compressed_cache_size=3)
    for compresses, values in [(True, 3), (False, 2 * 2 * 8 / 2)]:
        parts = rollout_memory(made, facts, 20, EngineCapabilities(compresses_cache=compresses))
        assert parts["KV cache (at most)"] == values * 2 * 64 * 3
    assert gpus(made, uses_rollouts=True) == 5
    assert processes(made, uses_rollouts=True)[-1] == ("rollout-0", "cosmos_core.rollout", "auto", 4)
