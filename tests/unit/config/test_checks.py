import pytest

from cosmos_core.config.checks import staleness_bound
from cosmos_core.config.loading import recipe_from
from cosmos_core.config.overrides import apply_override
from cosmos_core.errors import ConfigError


def load(*overrides: str):
    data = {
        "run": {"name": "a", "steps": 3},
        "model": {"path": "m"},
        "algorithm": {"plugin": "grpo"},
        "policy": {"optimizer": {"lr": 1e-6}},
        "dataset": {"plugin": "arithmetic"},
        "reward": [{"plugin": "math"}],
    }
    for override in overrides:
        apply_override(data, override)
    return recipe_from(data)


def test_contradictions_are_refused(subtests):
    for overrides, message in [
        (["model.config={hidden_size=8}"], "model.path: given .* besides model.config"),
        (["model={}"], "neither model.path nor model.config"),
        (
            ['reward=[{plugin="a"}, {plugin="a"}]'],
            r'give each one of its own: name = "…" in its \[\[reward\]\], or --set reward\.0\.name=…',
        ),
        (['reward=[{plugin="a"}, {plugin="b", name="a"}]'], "a is listed 2 times; rewards are reported by name, give"),
        (
            ["environment.plugin=a", 'reward=[{plugin="a"}]'],
            "environment.plugin: a is the name of a reward, too",
        ),
        (["environment={plugin='a', max_turns=0}"], "environment.max_turns: must be >= 1, got 0"),
        (["sync.mode=sync", "sync.interval=2"], "sync.interval: .*lag up to 1, more than the 0"),
        (["sync.interval=4", "sync.max_staleness=2"], "lag up to 3, more than the 2"),
        (["sync.transport=disk"], "sync.directory: not given, and sync.transport 'disk'"),
        (["sync.transport=zmq", "sync.directory=d"], r"sync.directory: given \(d\), but sync.transport 'zmq' never"),
        (["sync.transport=nccl", "rollout.device=cpu"], "'nccl' sends from GPU to GPU, and rollout.device is 'cpu'"),
        (
            ["sync.transport=gloo", "sync.delta=true"],
            "sync.delta: true, but with sync.transport 'gloo' weights come whole",
        ),
        (["policy.device=gpu"], 'policy.device: expected one of .*got "gpu"; did you mean "cuda"'),
        (["sync.transport=tcp"], 'sync.transport: expected one of .*"disk", got "tcp"'),
        (["policy.parallel.cpu_offload=true", "policy.mesh.dp_shard=2", "policy.device=cpu"], "CPU memory already"),
        (["policy.parallel.cpu_offload=true"], "cpu_offload: .* a replica of one process"),
        (["rollout.mesh.dp_shard=4"], "rollout.mesh.dp_shard: must be 1, got 4; .*rollout.replicas"),
        (["policy.optimizer.betas=[0.9, 1.0]"], "policy.optimizer.betas: must be < 1.0: 1.0, got"),
        (
            ["warmup={plugin='s', steps=1, optimizer={lr=1e-3, betas=[-1, 0.5]}}"],
            "warmup.optimizer.betas: must be >= 0",
        ),
        (["policy.replicas=3", "policy.prompts_per_step=2"], "policy.prompts_per_step: 2 prompts"),
        (
            ["policy.replicas=3", "warmup={plugin='s', steps=1, prompts_per_step=2, optimizer={lr=1e-3}}"],
            "warmup.prompts_per_step: 2 prompts",
        ),
        (["evaluation.max_units=0"], "evaluation.max_units: must be >= 1, got 0"),
        (["control.lost_after_s=1"], "control.lost_after_s: 1.0 s is not longer"),
        (["tracking.hooks=['mlflow']", "tracking.options.mlfow.x=1"], r"mlfow: no such hook.*did you mean mlflow\?"),
        (["tracking.hooks=['mlflow', 'mlflow']"], "mlflow is listed 2 times"),
        (["teacher={}"], "teacher.path: not given; a teacher without a checkpoint would be the policy itself"),
        (["reference.plugin=moe"], "reference.plugin: 'moe', but a reference without a path has the policy's own"),
        (["teacher.path="], "teacher.path: empty; name a checkpoint$"),
        (["reference.path="], "reference.path: empty; name a checkpoint, or leave it out"),
        (["rollout.sampling.temperature=0"], "rollout.sampling.temperature: must be > 0.0, got 0.0"),
    ]:
        with subtests.test(overrides=overrides), pytest.raises(ConfigError, match=message):
            load(*overrides)


def test_all_contradictions_are_listed():
    with pytest.raises(ConfigError) as caught:
        load("policy.parallel.cpu_offload=true", "rollout.mesh.cp=2", "rollout.mesh.pp=2", "sync.interval=9")
    assert len(str(caught.value).splitlines()) == 4


def test_sync_mode_has_no_staleness():
    assert staleness_bound(load("sync.mode=sync", "sync.max_staleness=3").sync) == 0
    assert staleness_bound(load().sync) == 2


def test_an_interval_within_the_staleness_is_fine():
    assert load("sync.interval=3", "sync.max_staleness=2").sync.interval == 3
