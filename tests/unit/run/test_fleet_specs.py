"""Which processes a run has."""

from __future__ import annotations

import attrs
import pytest

from cosmos_core.config.schema import MeshConfig
from cosmos_core.run.fleet import replica_specs


@pytest.fixture
def specs(job, monkeypatch):
    def specs(*, replicas=1, gpus="", **mesh):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
        policy = attrs.evolve(job.recipe.policy, replicas=replicas, mesh=MeshConfig(**mesh), device="auto")
        return replica_specs(attrs.evolve(job, recipe=attrs.evolve(job.recipe, policy=policy)), "tcp://a:1", None)

    return specs


def argument(spec, name):
    words = list(spec.arguments)
    return words[words.index(name) + 1] if name in words else None


def test_every_process_of_a_replica_has_a_name_a_rank_and_a_gpu(specs):
    found = [spec for spec in specs(replicas=2, gpus="0,1,2,3", dp_shard=2, tp=2) if "policy" in spec.module]
    assert [spec.name for spec in found] == [
        *["policy-0", "policy-0.1", "policy-0.2", "policy-0.3"],
        *["policy-1", "policy-1.1", "policy-1.2", "policy-1.3"],
    ]
    assert [argument(spec, "--name") for spec in found] == [spec.name for spec in found]
    assert [argument(spec, "--rank") for spec in found] == ["0", "1", "2", "3"] * 2
    assert [spec.environment["CUDA_VISIBLE_DEVICES"] for spec in found] == ["0", "1", "2", "3"] * 2
    sessions = [argument(spec, "--session") for spec in found]
    assert len({*sessions[:4]}) == len({*sessions[4:]}) == 1
    assert sessions[0] != sessions[4]

    # A replica of one process is started as ever.
    spec = specs()[0]
    assert (spec.name, spec.module) == ("policy-0", "cosmos_core.policy")
    assert argument(spec, "--rank") is None
    assert argument(spec, "--session") is None

    # A session is of one start.
    first, second = (argument(specs(cp=2)[0], "--session") for _ in range(2))
    assert first != second


def test_a_rollout_replica_sees_a_gpu_for_each_of_its_engines_processes(job, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4")
    rollout = attrs.evolve(job.recipe.rollout, replicas=2, mesh=MeshConfig(tp=2), device="auto")
    recipe = attrs.evolve(job.recipe, rollout=rollout, policy=attrs.evolve(job.recipe.policy, device="auto"))
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    found = replica_specs(attrs.evolve(job, recipe=recipe), "tcp://a:1", None)
    segments = {spec.name.partition("-")[0]: spec.environment.get("PYTORCH_ALLOC_CONF") for spec in found}
    assert segments == {"policy": "expandable_segments:True", "rollout": None}
    assert {spec.environment["TORCH_NCCL_DUMP_ON_TIMEOUT"] for spec in found} == {"0"}
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")
    given = replica_specs(attrs.evolve(job, recipe=recipe), "tcp://a:1", None)
    assert not any("TORCH_NCCL_DUMP_ON_TIMEOUT" in spec.environment for spec in given), "the user's own"
    assert not any("PYTORCH_ALLOC_CONF" in spec.environment for spec in given), "the user's own"
    assert {spec.name: spec.environment["CUDA_VISIBLE_DEVICES"] for spec in found} == {
        "policy-0": "0",
        "rollout-0": "1,2",
        "rollout-1": "3,4",
    }

    assert not any("CUDA_DEVICE_ORDER" in spec.environment for spec in found), "the user's numbers are in their order"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    (first, *_) = replica_specs(attrs.evolve(job, recipe=recipe), "tcp://a:1", None)
    assert first.environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4")

    # Pools that take turns have the same ones.
    recipe = attrs.evolve(recipe, rollout=attrs.evolve(rollout, placement="colocated"))
    found = replica_specs(attrs.evolve(job, recipe=recipe, uses_rollouts=True), "tcp://a:1", None)
    assert [spec.environment["CUDA_VISIBLE_DEVICES"] for spec in found] == ["0", "0,1", "2,3"]


def test_threads_follow_a_process_share_of_the_cores(job, monkeypatch, subtests):
    recipe = attrs.evolve(
        job.recipe,
        policy=attrs.evolve(job.recipe.policy, device="auto"),
        rollout=attrs.evolve(job.recipe.rollout, device="auto", mesh=MeshConfig(tp=2), reward_workers=8),
    )
    for cores, gpus, asked, told, expected in [
        (208, "0,1,2,3,4,5,6,7", None, "", {"policy": "8", "rollout": "5"}),  # 52 cores for 2 GPUs and 8 workers
        (16, "0,1,2,3,4,5,6,7", None, "", {"policy": "2", "rollout": "1"}),
        (208, "0,1,2,3,4,5,6,7", 12, "3", {"policy": "12", "rollout": "12"}),
        (208, "0,1,2,3,4,5,6,7", None, "3", {"policy": "3", "rollout": "3"}),
        (208, "", None, "", {"policy": "1", "rollout": "1"}),
    ]:
        with subtests.test(cores=cores, gpus=gpus, asked=asked, told=told):
            monkeypatch.setattr("os.sched_getaffinity", lambda _pid, cores=cores: set(range(cores)))
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
            monkeypatch.setenv("OMP_NUM_THREADS", told)
            changed = attrs.evolve(recipe, launch=attrs.evolve(recipe.launch, threads=asked))
            found = replica_specs(attrs.evolve(job, recipe=changed), "tcp://a:1", None)
            threads = {spec.name.partition("-")[0]: spec.environment["OMP_NUM_THREADS"] for spec in found}
            assert threads == expected
