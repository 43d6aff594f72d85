import attrs
import pytest

from cosmos_core.config.loading import recipe_from
from cosmos_core.protocols import ModelFacts
from cosmos_core.run.estimate import policy_memory, processes, rollout_memory, sync_bytes
from cosmos_core.run.tables import size

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
        "dataset": {"plugin": "numbers"},
    }
    return recipe_from({**base, **changes})


def test_memory_of_a_policy_replica_by_hand():
    parts = policy_memory(recipe(policy={"precision": "fp32", "micro_batch_units": 100}), FACTS)
    assert parts["parameters"] == parts["gradients"] == 4000
    assert parts["optimizer"] == 8000
    # 100 units x 8 wide x 2 layers x 34 bytes of 16-bit values, twice that in fp32
    assert parts["activations (estimate)"] == 100 * 8 * 2 * 34 * 2
    assert parts["logits (estimate)"] == 2 * 4 * 100 * 30


def test_checkpointing_keeps_one_value_a_layer():
    policy = {"precision": "bf16", "micro_batch_units": 100, "parallel": {"recompute": "full"}}
    assert policy_memory(recipe(policy=policy), FACTS)["activations (estimate)"] == 100 * 8 * 2 * 2


def test_memory_of_a_rollout_replica_by_hand():
    made = recipe(rollout={"precision": "bf16", "max_in_flight": 3, "sampling": {"max_units": 10}})
    parts = rollout_memory(made, FACTS, longest_prompt=20)
    assert parts["parameters"] == 2000
    assert parts["KV cache (at most)"] == 2 * 2 * 8 * 2 * 30 * 3
    longer = rollout_memory(made, attrs.evolve(FACTS, context_length=15), longest_prompt=20)
    assert longer["KV cache (at most)"] == 2 * 2 * 8 * 2 * 15 * 3


@pytest.mark.parametrize(("precision", "expected"), [("fp32", 4000), ("bf16", 2000)])
def test_bytes_of_a_weight_sync(precision, expected):
    assert sync_bytes(recipe(rollout={"precision": precision}), FACTS) == expected


def test_the_process_table_names_everyone():
    made = recipe(policy={"replicas": 2}, rollout={"replicas": 2, "device": "cpu"})
    assert processes(made, uses_rollouts=True) == [
        ("controller", "cosmos_core.controller", "cpu"),
        ("policy-0", "cosmos_core.policy", "auto"),
        ("policy-1", "cosmos_core.policy", "auto"),
        ("rollout-0", "cosmos_core.rollout", "cpu"),
        ("rollout-1", "cosmos_core.rollout", "cpu"),
    ]
    assert len(processes(made, uses_rollouts=False)) == 3


def test_sizes_are_for_people():
    assert [size(number) for number in (0, 1023, 1536, 3 << 30, 5 << 50)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "3.0 GiB",
        "5120.0 TiB",
    ]
