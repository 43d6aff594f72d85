"""Memory of a process by hand, on a model with round numbers."""

import attrs

from cosmos_core.config.loading import recipe_from
from cosmos_core.config.schema import MeshConfig, PolicyConfig
from cosmos_core.protocols import ModelFacts
from cosmos_core.protocols.facts import Kept, ModelPart
from cosmos_core.run.planning.memory import policy_memory, whole_over_tp

KEPT = Kept(stream=100, inputs=50, inner=200, routed=0, entry=40, products=80)
LAYER = ModelPart(
    name="layers 1-8",
    count=8,
    is_layer=True,
    num_parameters=1000,
    num_whole_parameters=200,
    widths={"q_proj": 30, "up_proj": 70},
    kept={"float32": KEPT, "bfloat16": KEPT, "autocast": KEPT},
)
NOTHING = {name: Kept(stream=0, inputs=0, inner=0, routed=0, entry=0, products=0) for name in LAYER.kept}
FACTS = ModelFacts(
    architecture="Tiny",
    num_parameters=10_400,
    num_layers=8,
    hidden_size=8,
    vocab_size=30,
    tokenizer_size=30,
    context_length=64,
    stop_ids=frozenset(),
    pad_id=0,
    num_tied_parameters=1600,
    parts=(
        ModelPart(name="embedding", num_parameters=1600, kept=NOTHING),
        LAYER,
        ModelPart(name="head", num_parameters=800, kept=NOTHING),
    ),
)
EXPERTS = ModelPart(
    name="layers 1-8",
    count=8,
    is_layer=True,
    num_parameters=1000,
    num_whole_parameters=200,
    num_expert_parameters=640,
    kept={"float32": Kept(stream=100, inputs=50, inner=200, routed=80, entry=40, products=80)},
)


def memory(mesh=None, *, facts=FACTS, references=0, **policy):
    recipe = recipe_from(
        {
            "run": {"name": "demo", "steps": 1},
            "model": {"plugin": "hf", "path": "x"},
            "algorithm": {"plugin": "grpo"},
            "dataset": {"plugin": "numbers"},
            "policy": {
                "optimizer": {"lr": 1e-6},
                "micro_batch_units": 16,
                "precision": "fp32",
                "mesh": mesh or {},
                **policy,
            },
        }
    )
    return policy_memory(recipe, facts, references=references)


def test_one_process_by_hand():
    # One process.
    (rank,) = memory()
    assert (rank.name, rank.count) == ("each process", 1)
    assert rank.device == {
        "parameters": 4 * 10_400,
        "gradients": 4 * 10_400,
        "optimizer": 8 * 10_400,
        "activations": 16 * 8 * 350,
        "logits": 3 * 4 * 16 * 30,
    }
    assert rank.host == {"checkpoint copy": 12 * 10_400, "published weights": 2 * 2 * 10_400}
    # Muon keeps one moment of the matrices of layers.
    (rank,) = memory(optimizer={"lr": 1e-6, "kind": "muon"})
    assert rank.device["optimizer"] == 8 * 10_400 - 4 * 8 * 800
    # What layers save waits in the machine's memory, but for three.
    (rank,) = memory(parallel={"offload_activations": True})
    assert rank.device["activations"] == 16 * 3 * 350
    assert rank.host["activations"] == 8 * (16 * 350 + (16 << 20))
    two = attrs.evolve(FACTS, parts=[attrs.evolve(part, count=2) if part.is_layer else part for part in FACTS.parts])
    (rank,) = memory(facts=two, parallel={"offload_activations": True})
    assert rank.device["activations"] == 16 * 2 * 350, "there are no three"
    (rank,) = memory(optimizer={"lr": 1e-6, "kind": "adamw-8bit"})
    assert rank.device["optimizer"] == 2 * 10_400 + 2 * 4 * 10_400 / 256
    assert (rank.host["checkpoint copy"], rank.host["restored moments"]) == (12 * 10_400, 8 * 10_400)
    # Where decisions come in chunks, the gradient of the output layer is summed.
    facts = attrs.evolve(FACTS, most_outputs=5 * 30)
    (rank,) = memory(facts=facts)
    assert rank.device["logits"] == 3 * 4 * 5 * 30 + (4 + 4) * 30 * 8
    (rank,) = memory(facts=facts, lora={"rank": 2})
    assert rank.device["logits"] == 3 * 4 * 5 * 30

    # Replicas divide nothing.
    (rank,) = memory({"dp_replicate": 4})
    assert rank.device["parameters"] == 4 * 10_400

    # References lie where the output layer is.
    first, last = memory({"pp": 2}, references=1234)
    assert last.device["reference predictions"] == 1234
    assert "reference predictions" not in first.device


def test_sharding_divides_weights_and_gathers_two_layers():
    (rank,) = memory({"dp_shard": 4})
    assert rank.count == 4
    assert rank.device["parameters"] == 10_400
    assert rank.device["gathered weights"] == 4 * (2400 + 2 * 1000)
    assert rank.device["activations"] == 16 * 8 * 350
    (kept,) = memory({"dp_shard": 4}, parallel={"reshard_after_forward": "never"})
    assert kept.device["gathered weights"] == 4 * 10_400

    # Context parallel splits units and shards weights.
    (rank,) = memory({"cp": 2})
    assert rank.device["parameters"] == 2 * 10_400
    assert rank.device["activations"] == 8 * 8 * 350


def test_tensor_parallel_splits_what_it_can():
    (rank,) = memory({"tp": 2})
    # Of a layer 200 of 1000 are whole; stream and inner values are split, inputs are not.
    assert rank.device["parameters"] == 4 * (800 + 8 * (400 + 200) + 400)
    assert rank.device["activations"] == 16 * 8 * (50 + 50 + 100)
    assert rank.device["logits"] == 3 * 4 * 16 * 30 // 2
    (whole,) = memory({"tp": 2}, parallel={"sequence_parallel": False})
    assert whole.device["activations"] == 16 * 8 * (100 + 50 + 100)

    # Heads that tensor parallel does not divide are whole.
    layer = attrs.evolve(LAYER, head_parameters={2: 160})
    facts = attrs.evolve(FACTS, parts=(FACTS.parts[0], layer, FACTS.parts[2]))
    (divided,) = memory({"tp": 2}, facts=facts)
    assert divided.device["parameters"] == memory({"tp": 2})[0].device["parameters"]
    (rank,) = memory({"tp": 4}, facts=facts)
    assert rank.device["parameters"] == 4 * (400 + 8 * (640 // 4 + 160 + 200) + 200)
    assert rank.device["gathered weights"] == 4 * (400 + 2 * (640 // 4 + 160 + 200) + 200)

    # What is whole on each process of tensor parallelism is told.
    facts = attrs.evolve(FACTS, parts=(FACTS.parts[0], attrs.evolve(EXPERTS, head_parameters={2: 160}), FACTS.parts[2]))

    def told(**mesh):
        return whole_over_tp(PolicyConfig(mesh=MeshConfig(**mesh)), facts)

    assert told(tp=1) == {}
    assert told(tp=2) == {"experts, which only ep spreads": 8 * 640, "norms and others": 8 * 200}
    assert told(tp=4, ep=4) == {"2 key-value heads, which 4 does not divide": 8 * 160, "norms and others": 8 * 200}


def test_a_pipeline_keeps_more_at_its_start():
    first, *_, last = ranks = memory({"pp": 4})
    assert [rank.count for rank in ranks] == [1, 1, 1, 1]
    assert [rank.device["activations"] for rank in ranks] == [16 * 2 * 350 * left for left in (4, 3, 2, 1)]
    assert first.device["parameters"] == 4 * (1600 + 2000)
    assert last.device["parameters"] == 4 * (800 + 2000 + 1600)  # its copy of what is tied
    assert [("logits" in rank.device) for rank in ranks] == [False, False, False, True]

    # A v shaped pipeline has both ends on one process.
    first, *others = memory({"pp": 4}, parallel={"schedule": "zero-bubble"})
    assert first.device["parameters"] == 4 * 10_400 - 3 * 4 * 2000
    assert "logits" in first.device
    assert sum(rank.count for rank in others) == 3
    assert all("logits" not in rank.device for rank in others)
    assert first.device["activations"] == 16 * 8 * 350

    # A pipeline keeps whole weights and gradients unless it frees them.
    first, last = memory({"pp": 2, "dp_shard": 2})
    whole = [1600 + 4 * 1000, 800 + 4 * 1000 + 1600]
    assert [rank.device["gathered weights"] for rank in (first, last)] == [4 * each for each in whole]
    assert [rank.device["whole gradients"] for rank in (first, last)] == [4 * each for each in whole]
    first, last = memory({"pp": 2, "dp_shard": 2}, parallel={"reshard_after_forward": "always"})
    assert first.device["gathered weights"] == 4 * (1600 + 2 * 1000)
    assert "whole gradients" not in first.device
    first, _ = memory({"pp": 2, "dp_shard": 2}, lora={"rank": 2, "modules": ["q_proj"]})
    assert first.device["whole gradients"] == 4 * 4 * 2 * 30


def test_choices_that_save_memory_do():
    # Recompute keeps less and computes one layer again.
    plain, compiled = ({"compile": each} for each in ("off", "on"))
    for parallel, kept in [({"recompute": "full"}, 40), (plain, 40 + 80), (compiled, 40 + 80 + 40)]:
        (rank,) = memory(parallel={"recompute": "selective", **parallel})
        assert rank.device["activations"] == 16 * (8 * kept + 350)

    # Offloaded weights are the hosts.
    (rank,) = memory({"dp_shard": 2}, parallel={"cpu_offload": True})
    assert "parameters" not in rank.device
    assert rank.host["parameters"] == rank.host["gradients"] == 2 * 10_400
    assert rank.host["optimizer"] == 4 * 10_400

    # Bfloat16 gathers half and casts what one process uses.
    (sharded,) = memory({"dp_shard": 4}, precision="bf16")
    assert sharded.device["gathered weights"] == 2 * (2400 + 2 * 1000)
    (alone,) = memory(precision="bf16")
    assert alone.device["gathered weights"] == 2 * 10_400


def test_adapters_and_experts_count_for_themselves():
    # Adapters have gradients and the weights none.
    (rank,) = memory(lora={"rank": 2, "modules": ["q_proj"]})
    assert rank.device["gradients"] == 4 * 8 * 2 * 30
    assert rank.device["optimizer"] == 2 * rank.device["gradients"]
    assert rank.host["checkpoint copy"] == 3 * rank.device["gradients"]
    assert rank.device["parameters"] == 4 * (10_400 + 8 * 2 * 30)
    # Published are the sums of both, one at a time: the layer's weights are 15 x 15 at most.
    assert rank.device["merged weight"] == 4 * 15 * 15
    (sharded, *_) = memory({"dp_shard": 2}, lora={"rank": 2, "modules": ["q_proj"]})
    assert sharded.device["merged weight"] == 4 * (113 + 8 * 2 * 30), "the adapters' parts come from everywhere"
    # Casts of weights that are not trained live as long as what needs them: a layer's backward pass, or its forward.
    for recompute, casts in [("none", 10_400), ("full", 2400 + 2 * 1000)]:
        (cast,) = memory(lora={"rank": 2}, precision="bf16", parallel={"recompute": recompute})
        assert cast.device["gathered weights"] == 2 * casts
    (every,) = memory(lora={"rank": 2})
    assert every.device["gradients"] == 4 * 8 * 2 * 100

    # Experts are spread over their own axis.
    facts = attrs.evolve(FACTS, parts=(FACTS.parts[0], EXPERTS, FACTS.parts[2]))
    (rank,) = memory({"dp_shard": 2, "tp": 2, "ep": 4}, facts=facts)
    # 160 of a layer are split by tp, 200 are not; experts are over all four.
    assert rank.device["parameters"] == 4 * ((800 + 400) // 2 + 8 * ((80 + 200) // 2 + 160))
    assert rank.device["activations"] == 16 * 8 * (50 + 50 + 100 + 40)
    (alone,) = memory({"tp": 2}, facts=facts)
    assert alone.device["activations"] == 16 * 8 * (50 + 50 + 100 + 80)


def test_what_is_exchanged_is_held_meanwhile():
    def communication(mesh, **policy):
        return [rank.device.get("communication", 0) for rank in memory(mesh, **policy)]

    # The largest gradient, as it is and in float32: the embedding's.
    assert communication({}) == [0]
    assert communication({"dp_shard": 4}) == communication({"dp_replicate": 4}) == [(4 + 4) * 1600]
    assert communication({"dp_shard": 4}, precision="bf16") == [(2 + 4) * 1600]
    assert communication({"dp_shard": 4}, lora={"rank": 2}) == [0], "adapters are small"
    # Rows of two neighbours on each axis that has any; context parallel splits the 16 rows, and shards.
    assert communication({"tp": 2}) == [2 * 16 * 8 * 4]
    assert communication({"pp": 2}) == 2 * [2 * 16 * 8 * 4]
    assert communication({"cp": 2}) == [(4 + 4) * 1600 + 2 * 8 * 8 * 4]
    assert communication({"tp": 2, "pp": 2}, precision="bf16") == 2 * [(2 + 2) * 16 * 8 * 2]
