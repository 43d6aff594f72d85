import pytest

from cosmos_core.config.loading import recipe_from
from cosmos_core.errors import ConfigError
from cosmos_core.protocols import Pool
from cosmos_core.run import fork_server
from cosmos_core.run.launch.launcher import nodes_of, pools, prepare

BASE = {
    "run": {"name": "x", "steps": 1},
    "model": {"plugin": "m", "path": "p"},
    "algorithm": {"plugin": "a"},
    "dataset": {"plugin": "d"},
    "policy": {"optimizer": {"lr": 1e-6}, "replicas": 2, "mesh": {"dp_shard": 2, "tp": 2}},
    "rollout": {"replicas": 3, "mesh": {"tp": 4}, "device": "cuda"},
}


def test_pools_have_processes_and_gpus():
    # A policy replica has processes and a rollout replica gpus.
    assert pools(recipe_from(BASE), uses_rollouts=True) == (
        Pool(role="policy", replicas=2, processes=4, gpus=1),
        Pool(role="rollout", replicas=3, processes=1, gpus=4, needs_gpus=True, workers=1),
    )

    # Nodes hold equally many processes of a replica each; a launcher that counts in GPUs is told of its own option.
    pool = Pool(role="policy", replicas=1, processes=12, gpus=2, needs_gpus=True)
    assert (pool.nodes(8), nodes_of(pool, 16, "cards"), nodes_of(pool, 8, "cards")) == (2, 2, 3)
    with pytest.raises(ConfigError, match=r"launch\.options\.cards_each is 0; give .* with --cards-each"):
        nodes_of(pool, 0, "cards_each")

    # Imitation needs no rollouts and the cpu no gpus.
    recipe = recipe_from({**BASE, "policy": {"optimizer": {"lr": 1e-6}, "device": "cpu"}})
    assert pools(recipe, uses_rollouts=False) == (Pool(role="policy", replicas=1),)


def test_another_launcher_than_this_machine_s_ends_the_fork_server(monkeypatch):
    called = []
    monkeypatch.setattr(fork_server, "prepare", called.append)
    monkeypatch.setattr(fork_server, "end", lambda: called.append("end"))
    prepare(recipe_from({**BASE, "launch": {"threads": 3}}))
    prepare(recipe_from({**BASE, "launch": {"launcher": "slurm"}}))
    assert called == [3, "end"]
