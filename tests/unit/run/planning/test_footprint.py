"""What a plan says about memory, and how it says it."""

import ast
import inspect
import io
from pathlib import Path
from unittest.mock import Mock

import attrs
import pytest
from rich.console import Console

from cosmos_core.config.loading import load_recipe
from cosmos_core.config.schema import MeshConfig
from cosmos_core.devices import Gpu
from cosmos_core.errors import ConfigError
from cosmos_core.protocols import Preflight
from cosmos_core.run.planning import footprint, memory
from cosmos_core.run.planning.footprint import (
    CONTEXT_BYTES,
    GPU_MEMORY,
    NCCL_BYTES,
    OUTSIDE,
    check_gpu_memory,
    crowded,
    host_memory,
    machine_memory,
    memory_by_pool,
    memory_on_cpu,
    planned_pools,
    room,
    size,
    verdict,
)
from cosmos_core.run.planning.memory import CACHE, ITEM_SIZES, RankMemory
from cosmos_core.run.planning.plan import make_plan
from cosmos_core.run.planning.processes import gpus
from cosmos_core.run.planning.tables import print_plan

RECIPES = Path(__file__).parents[4] / "recipes"
GIB = 1 << 30


def rank(gib, name="each process", *, is_whole=True):
    return RankMemory(
        name=name,
        count=2,
        device={"parameters": int(gib * GIB)},
        host={"published weights": 999 * GIB},
        is_whole=is_whole,
    )


def test_a_verdict_names_gpus_for_the_largest_process():
    # Gpus that hold a process.
    for gib, said in [
        (71.0, "71.0 GiB a process: a GPU of 80 GB (H100) or 141 GB (H200) holds it with a tenth free"),
        (71.2, "71.2 GiB a process: a GPU of 141 GB (H200) holds it with a tenth free"),
        (125.0, "125.0 GiB a process: a GPU of 141 GB (H200) holds it with a tenth free"),
        (125.2, "125.2 GiB a process: no GPU of 80 GB (H100) or 141 GB (H200) holds it with a tenth free"),
    ]:
        assert verdict([rank(gib)], "auto") == f"at most {said}"

    assert verdict([rank(0.5)], "auto") == "at most 512.0 MiB a process", "any GPU holds it"

    # The largest process decides.
    ranks = [rank(3, "place 0"), rank(90, "places 1-2"), rank(70, "place 3")]
    assert verdict(ranks, "cuda").startswith("at most 90.0 GiB a process (places 1-2): a GPU of 141")
    assert verdict(ranks, "cpu") == "at most 90.0 GiB a process (places 1-2)"

    # No gpu is said to hold what is not known.
    ranks = [rank(3, "place 0", is_whole=False), rank(90, "places 1-2")]
    counted = "90.0 GiB a process (places 1-2) of what is counted (parameters); activations on top"
    assert verdict(ranks, "cuda") == f"{counted}, so which GPU holds it is not known"
    assert verdict(ranks, "cpu") == counted
    assert (
        "126.0 GiB a process of what is counted (parameters); activations, towers on top: no GPU of 80 GB"
        in verdict([rank(126, is_whole=False)], "cuda", ["towers"])
    )
    assert verdict([rank(3)], "cpu", ["towers"]).endswith("of what is counted (parameters); towers on top")

    # An engine that takes a share of its GPU has room for its weights there, and leaves a tenth free itself.
    cached = attrs.evolve(rank(60), device={"parameters": 60 * GIB, CACHE: 9 * GIB})
    assert ": a GPU of 80 GB (H100) or 141" in verdict([cached], "cuda", share=0.85)
    assert ": a GPU of 141 GB (H200) holds it" in verdict([cached], "cuda", share=0.7)
    # The cache is as large as it finds room.
    full = attrs.evolve(rank(60), device={"parameters": 60 * GIB, CACHE: 300 * GIB})
    for share, fitting in [(0.85, "80 GB (H100) or 141 GB (H200)"), (0.7, "141 GB (H200)")]:
        said = verdict([full], "cuda", share=share)
        assert said.startswith(f"at most 360.0 GiB a process: a GPU of {fitting} holds it with a tenth free; its KV")
    none = "no GPU of 80 GB (H100) or 141 GB (H200) holds it with a tenth free, where its engine takes"
    for share in (0.4, 0.95):
        assert verdict([cached], "cuda", share=share).endswith(f"{none} {share:.0%} of one")


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    path = RECIPES / "sft-arithmetic.toml"
    overrides = ["policy.mesh.pp=2", "policy.replicas=3", "run.steps=200000"]
    return make_plan(load_recipe(path, overrides=overrides), path, tmp_path_factory.mktemp("plan"))


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """A plan of both pools, for GPUs."""
    path = RECIPES / "sft-arithmetic.toml"
    overrides = [
        "policy.mesh.tp=4",
        'reward=[{plugin="math"}]',
        "rollout.sampling.max_units=24",
        "evaluation.prompts=8",
        "policy.device=cuda",
        "rollout.device=cuda",
        'warmup={plugin="sft",steps=1,optimizer={lr=1e-3,kind="muon"}}',
    ]
    return make_plan(load_recipe(path, overrides=overrides), path, tmp_path_factory.mktemp("both"))


def printed(plan, width):
    console = Console(file=io.StringIO(), width=width)
    print_plan(plan, console)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def other(plan, **tables):
    """A plan with some keys of some tables of its recipe changed."""
    recipe = plan.job.recipe
    changed = {name: attrs.evolve(getattr(recipe, name), **keys) for name, keys in tables.items()}
    return attrs.evolve(plan, job=attrs.evolve(plan.job, recipe=attrs.evolve(recipe, **changed)))


def test_a_plan_has_a_row_for_replicas_and_a_table_for_places(plan):
    # Replicas share a row and places a table.
    lines = printed(plan, 140)
    assert [line.split()[:3] for line in lines if line.startswith("policy-")] == [["policy-0", "…", "policy-2"]]
    assert any("3 x 2" in line for line in lines)
    assert len([line for line in lines if line.startswith("parameters ")]) == 1
    assert any(line.split()[-4:] == ["place", "0", "place", "1"] for line in lines)
    assert any("sft repeats the dataset" in line for line in lines)

    # A narrow terminal gets more tables.
    lines = printed(plan, 45)
    assert len([line for line in lines if line.startswith("parameters ")]) == 2
    assert max(map(len, lines)) <= 45

    # All processes count against the machine.
    needed = memory_on_cpu(plan)
    total = sum(needed.values())
    assert "so device 'auto' is the CPU: " in room(plan, 0, total)
    said = room(plan, 0, total - 1)
    assert f"{size(total)} do not fit its memory" in said
    assert f": policy {size(needed['policy'])} + host {size(needed['host'])} of all processes" in said
    assert room(plan, 7, total) == "this machine has 7"
    held = needed["host"]
    said = f"this machine has 7; its memory of {size(held - 1)} does not hold the {size(held)} of it that all processes"
    assert room(plan, 7, held - 1) == f"{said} take"
    assert machine_memory() > GIB


def test_gpus_that_do_not_hold_their_processes_are_refused(plan, monkeypatch):
    # Of three replicas of two processes each GPU gets three.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,1")
    (pool,) = planned_pools(plan)
    need, there = (
        3 * pool.device_bytes,
        Gpu(number="0", uuid="GPU-a", name="T4", memory_bytes=0, free_bytes=0, driver=""),
    )

    def crowds(memory_bytes, free_bytes, index="0"):
        gpu = there._replace(number=index, memory_bytes=memory_bytes, free_bytes=free_bytes)
        monkeypatch.setattr(footprint, "gpus", lambda: [gpu, there._replace(number="5", uuid="GPU-b")])
        return crowded(plan)

    assert crowds(need, need) == ""
    assert crowds(0, 0) == "", "a GPU that shares the host's memory"
    assert crowds(need - 1, need - 1).startswith("GPU 0, T4, has ")
    assert "; spread them over more GPUs" in crowds(need - 1, need - 1)
    assert f"; others hold {size(need + 1)} of it" in crowds(2 * need, need - 1, index="1")
    assert "and a run would be refused: GPU 1, T4" in room(plan, 2, 0)
    with pytest.raises(ConfigError, match="its processes need"):
        check_gpu_memory(plan)

    # A replica that joins is alone.
    monkeypatch.setattr(footprint, "gpus", lambda: [there._replace(memory_bytes=2 * need, free_bytes=need // 3 - 1)])
    assert f"need {size(need // 3)}; others hold" in crowded(plan, "policy")
    monkeypatch.setattr(footprint, "gpus", lambda: [there._replace(memory_bytes=2 * need, free_bytes=need // 3)])
    assert crowded(plan, "policy") == ""

    # A GPU that computes in bfloat16 as if it could, and one whose state nobody knows.
    monkeypatch.setattr(footprint, "gpus", lambda: [there._replace(memory_bytes=need, capability=(7, 5))])
    lacking = crowded(other(plan, policy={"precision": "bf16"}))
    assert lacking.startswith(
        "policy.precision: 'bf16' needs a GPU of compute capability 8.0 or more, and GPU 0, T4, has "
    )
    assert "bf16" not in crowded(plan)
    monkeypatch.setattr(footprint, "gpus", Mock(side_effect=ConfigError("nvidia-smi says: lost")))
    assert "and a run would be refused: nvidia-smi says: lost" in room(plan, 2, 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert crowded(plan) == ""
    assert "CUDA_VISIBLE_DEVICES hides any GPU of this machine, so device 'auto' is the CPU" in room(plan, 0, 1 << 60)


def test_the_share_of_a_gpu_that_an_engine_takes_counts(tmp_path, monkeypatch):
    path = RECIPES / "arithmetic.toml"
    planned = make_plan(load_recipe(path), path, tmp_path)
    gpu = Gpu(number="0", uuid="GPU-a", name="H100", memory_bytes=79 * GIB, free_bytes=79 * GIB, driver="")
    monkeypatch.setattr(footprint, "gpus", lambda: [gpu])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")

    def crowds(share, **changes):
        told = Preflight(gpu_share=share, gpu_share_key="engine.share")
        return crowded(other(attrs.evolve(planned, parts=attrs.evolve(planned.parts, preflight=told)), rollout=changes))

    assert crowds(0.0) == crowds(0.85) == ""
    # Two engines, or an engine and the policy, do not have more than there is.
    assert "its processes need 135.0 GiB, with 67.2 GiB for each engine (engine.share = 0.85); spread" in crowds(
        0.85, replicas=2
    )
    assert "make them smaller, or lower engine.share: docs" in crowds(1.0)
    assert crowds(0.995, placement="colocated").startswith("GPU 0, H100, has 79.0 GiB, and its processes need 79.1 GiB")
    assert crowds(0.985, placement="colocated") == ""
    # Of a cache that might be larger it has what there is.
    assert crowds(0.85, max_in_flight=2_000_000) == ""
    assert "its processes need " in crowds(0.0, max_in_flight=2_000_000)
    assert "; without its cache one needs " in crowds(0.005)
    assert crowds(0.005).endswith("raise engine.share, or rollout.mesh.tp")


def test_dialogues_are_counted_in_turns_and_units(tmp_path):
    path = RECIPES / "grpo-calculator.toml"
    recipe = load_recipe(path)
    text = " ".join(" ".join(printed(make_plan(recipe, path, tmp_path), 200)).split())
    # 16 prompts x 8 samples x 4 turns; of a context of 128, a micro-batch has more.
    assert recipe.policy.micro_batch_units > 128
    assert (
        "dialogues of up to 4 turns and 3 observations; the model's own units are at most 32 a sample, with prompt and "
        "observations 128 (in evaluations 128); each turn is a request with all units before it as its prompt, up to "
        "512 a step" in text
    )
    assert f"{16 * 8 * 128:,}" in text


def test_weights_on_their_way_and_communicators_are_counted(both):
    (rank,) = memory_by_pool(both)["rollout"]
    assert rank.host == {}
    # An engine that makes its own weights first has these in the machine's memory, and then those on their way.
    telling = attrs.evolve(
        both, parts=attrs.evolve(both.parts, preflight=Preflight(builds_on_host=True, outside_bytes=GIB))
    )
    (made,) = memory_by_pool(telling)["rollout"]
    assert made.host == {"first weights": rank.device["parameters"]}
    assert made.device[OUTSIDE] == rank.device[OUTSIDE] + GIB
    (rank,) = memory_by_pool(other(telling, rollout={"mesh": MeshConfig(tp=2)}))["rollout"]
    assert (rank.count, rank.host) == (2, {"weights on their way": rank.device["parameters"]})
    # Through a process group they wait on the host, whatever the layout; NCCL has what is on its way on both GPUs.
    pools = memory_by_pool(other(both, sync={"transport": "nccl"}))
    assert pools["rollout"][0].host == {"weights on their way": pools["rollout"][0].device["parameters"]}
    on_their_way = {name: ranks[0].device["weights on their way"] for name, ranks in pools.items()}
    assert on_their_way == {"policy": 8 << 20, "rollout": 4 * 4 * (8 << 20)}
    # Each pair of a publisher and a receiver keeps its communicator.
    outside = {name: ranks[0].device[OUTSIDE] - CONTEXT_BYTES for name, ranks in pools.items()}
    assert outside == {"policy": (2 + 1) * NCCL_BYTES, "rollout": 4 * NCCL_BYTES}
    pools = memory_by_pool(other(both, rollout={"replicas": 9}, sync={"transport": "nccl", "fan_out": 3}))
    outside = {name: ranks[0].device[OUTSIDE] - CONTEXT_BYTES for name, ranks in pools.items()}
    assert outside == {"policy": (2 + 3) * NCCL_BYTES, "rollout": (4 + 3) * NCCL_BYTES}


def test_pools_that_take_turns_need_the_larger_of_two(plan, both):
    turning = other(both, rollout={"placement": "colocated"})
    (rank,) = memory_by_pool(turning)["policy"]
    # The machine's memory holds what sleeps.
    assert rank.host["while it sleeps"] == rank.device["parameters"] + rank.device["optimizer"]
    assert [gpus(each.job.recipe, uses_rollouts=True) for each in (both, turning)] == [5, 4]
    assert rank.device[OUTSIDE] == 2 * CONTEXT_BYTES + 2 * NCCL_BYTES, "tp's communicator, and that of all"
    # In the memory of a machine without GPUs is nothing of the kind.
    (rank,) = memory_by_pool(both)["rollout"]
    alone = sum(rank.device.values()) - CONTEXT_BYTES
    assert memory_on_cpu(both) == {**memory_on_cpu(turning), "rollout": alone}
    assert OUTSIDE not in memory_by_pool(plan)["policy"][0].device, "a tiny run, on a machine without GPUs"
    assert "and policy.device and rollout.device = 'cuda' asks for them" in room(turning, 0, 1 << 60)
    (rank,) = memory_by_pool(other(turning, policy={"device": "cpu"}))["policy"]
    assert OUTSIDE not in rank.device
    # A pool on the CPU takes the memory of a machine that has GPUs for the other, and of two in turns the larger.
    mixed, on_cpu = other(both, policy={"device": "cpu"}), {"device": "cpu"}
    (rank,), (rollout,) = memory_by_pool(mixed).values()
    held = 4 * sum({**rank.device, **rank.host}.values()) + sum(rollout.host.values())
    assert host_memory(mixed) == held > host_memory(both) > 0
    assert f"; its memory of {size(held - 1)} does not hold the {size(held)} of it" in room(mixed, 1, held - 1)
    assert room(mixed, 1, held) == "this machine has 1"
    for alone in (other(each, policy=on_cpu, rollout=on_cpu) for each in (both, turning)):
        assert host_memory(alone) == sum(memory_on_cpu(alone).values())
    assert any("4, one for each process of either pool, in turns; " in line for line in printed(turning, 200))


def parts_of_memory():
    """The names that the plan gives to parts: the other keys of dictionaries in the modules that count them."""
    others = {*GPU_MEMORY, *ITEM_SIZES, "policy", "rollout", "host", "always", "never", "auto", "on", "off"}
    for module in (memory, footprint):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            for key in node.keys if isinstance(node, ast.Dict) else ():
                name = getattr(module, key.id) if isinstance(key, ast.Name) else key and ast.literal_eval(key)
                if name and name not in others:
                    yield name.partition(" (")[0]


def test_what_is_whole_and_what_is_measured_has_a_row(plan, both):
    assert (plan.job.num_measured_prompts, plan.job.uses_rollouts) == (plan.job.num_evaluation_prompts, False)
    assert (both.job.num_measured_prompts, both.job.uses_rollouts) == (8, True)
    lines = [" ".join(line.split()) for line in printed(both, 200)]
    assert any(
        line.startswith("whole on each of tp ") and "2 key-value heads, which 4 does not divide: " in line
        for line in lines
    )
    assert "optimizer adamw, and muon in the warm-up: memory is that of the one that keeps more" in lines
    assert any("8 held-out prompts (rewards, and their demonstrations' loss), " in line for line in lines)
    assert any("held-out demonstrations (their loss), " in line for line in printed(plan, 200))
    assert not any("whole on each of tp" in line for line in printed(plan, 200))
    # Parts of memory have theirs in the documentation.
    page = (RECIPES.parent / "docs" / "layouts.md").read_text()
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| ")]
    named = {name.strip() for cell in cells for name in cell.replace("(host)", "").split(",")}
    assert "restored moments" in (parts := set(parts_of_memory()))
    assert parts <= named


def test_a_world_model_has_no_rows_of_language_models(tmp_path):
    for name, overrides in [("wan-tiny-sft", ["reward=[]"]), ("wan-tiny-grpo-fast", [])]:
        path, makes_rollouts = RECIPES / f"wfm/{name}.toml", not overrides
        plan = make_plan(load_recipe(path, overrides=overrides), path, tmp_path)
        lines = [" ".join(line.split()) for line in printed(plan, 400)]
        (model,) = [line for line in lines if line.startswith("model ")]
        assert model.endswith(" M parameters, 2 layers x 24")
        assert any(line.startswith("engine ") for line in lines) is makes_rollouts
        verdicts = [line for line in lines if line.startswith(("policy memory", "rollout memory"))]
        assert len(verdicts) == 1 + makes_rollouts
        for said in verdicts:
            assert said.endswith(", so which GPU holds it is not known")
            assert "guidance's second forward on top" in said
