import re

from cosmos_core.config.loading import recipe_from
from cosmos_core.config.overrides import apply_override
from cosmos_core.run.planning import weight_transport as transports


def recipe(*overrides):
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


def test_a_plan_says_how_weights_travel_and_why(monkeypatch, tmp_path):
    for overrides, said in [
        ([], "shared memory: launch.launcher 'local' starts every process on this machine"),
        (["sync.directory=d/e"], "starts every process on this machine; from d/e where nobody answers"),
        (["sync.transport=shared-memory"], "shared memory: sync.transport = 'shared-memory'"),
        (["sync.transport=zmq"], "ZeroMQ, on this machine, too: sync.transport = 'zmq'"),
        (["sync.transport=zmq", "rollout.replicas=9"], "; rollout replicas pass them on, each to at most 8"),
        (["sync.transport=zmq", "sync.delta=true"], r"= 'zmq'; only values that changed \(sync.delta\)$"),
        (["sync.delta=true"], "on this machine; nothing is sent, so that sync.delta spares nothing"),
        (["sync.transport=gloo"], "a gloo process group of each rollout replica with each policy process"),
        (["sync.transport=nccl"], "an NCCL process group .* between GPUs: sync.transport = 'nccl'"),
        (["sync.transport=disk", "sync.directory=s3://b/p"], "stored in s3://b/p before they are announced: sync.tran"),
    ]:
        monkeypatch.chdir(tmp_path)
        planned = recipe(*overrides)
        assert re.search(said, transports.transport(planned))
        assert list(transports.misfits(planned, num_gpus=2)) == []
        assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_is_refused_with_what_to_do(tmp_path, monkeypatch):
    for overrides, num_gpus, message in [
        (["sync.transport=nccl"], 0, "needs a GPU for each of the 2 processes .* this machine has 0"),
        (["sync.transport=nccl", "policy.mesh.dp_shard=2", "rollout.replicas=3"], 4, "the 5 processes .* has 4"),
        (["sync.directory='nowhere://d'"], 0, "sync.directory: 'nowhere://d' cannot be used: .*nowhere"),
        (["sync.directory='memory://d'"], 0, "sync.directory: 'memory://d' is in the memory of one process"),
    ]:
        (problem,) = transports.misfits(recipe(*overrides), num_gpus)
        assert re.search(message, problem)

    # Pools on the same GPUs are refused it anywhere, for another reason (`placement_misfits`).
    assert list(transports.misfits(recipe("sync.transport=nccl", "rollout.placement=colocated"), 0)) == []

    # A directory that cannot be written is refused.
    (tmp_path / "file").write_text("")
    where = tmp_path / "file" / "below"
    (problem,) = transports.misfits(recipe(f"sync.directory={str(where)!r}"), 0)
    assert problem == (
        f"sync.directory: {str(where)!r} cannot be written: {tmp_path / 'file'}: Not a directory; "
        "give a folder that can be"
    )
    (problem,) = transports.misfits(recipe("sync.directory=/proc/here"), 0)
    assert "sync.directory: '/proc/here' cannot be written: /proc: " in problem

    # A label of the rack that is none is refused before anything starts.
    monkeypatch.setenv("COSMOS_RACK", "rack 7")
    assert list(transports.misfits(recipe(), 0)) == [
        "COSMOS_RACK='rack 7': a label has neither white space nor an @; give one word, such as rack-7"
    ]

    monkeypatch.delenv("COSMOS_RACK")

    # A bucket needs a library.
    def without(url):
        raise ImportError(f"Install s3fs to access {url}")

    monkeypatch.setattr(transports, "file_system", without)
    (problem,) = transports.misfits(recipe("sync.directory='s3://b/p'"), 0)
    assert "sync.directory: 's3://b/p' needs a library" in problem
    assert "install cosmos-core[s3]" in problem
