"""Checkpoints in a bucket, of a server on this machine that refuses, and goes away and comes back."""

import pytest
import torch

from cosmos_core.errors import CheckpointError
from cosmos_core.policy.checkpoints import checkpoint
from cosmos_core.policy.checkpoints.checkpoint import Place
from cosmos_core.policy.checkpoints.reader import load_shares, restore
from cosmos_core.policy.checkpoints.saver import CheckpointSaver, copy_state, write_checkpoint
from cosmos_core.transport.reports import CheckpointFailed

pytest.importorskip("moto", reason="needs moto, which `make` installs")
pytest.importorskip("s3fs", reason="needs cosmos-core[s3], which `make` installs")
torch.set_num_threads(1)

URL = "s3://checkpoints/of/a/run"
EXPIRED = r"\(403: refused\); the credentials have expired.* renew PROD_S3_CHECKPOINT_ACCESS_KEY_ID"


@pytest.fixture(scope="module")
def server():
    from tests.buckets import BucketServer

    server = BucketServer()
    server.start()
    server.make_bucket("checkpoints")
    yield server
    server.stop()


@pytest.fixture
def store(server, monkeypatch):
    for name, value in server.credentials.items():
        monkeypatch.setenv(name, value)
    yield server
    server.is_expired, server.fault = False, lambda method, path: None
    files, root = checkpoint.file_system(URL)
    if files.exists(root):
        files.rm(root, recursive=True)


def place(step):
    return Place(run_id="r", step=step, stage=0, nonfinite_steps=1)


@pytest.fixture
def trainer(kit, model):
    return kit.make_trainer(model)


def weights(trainer):
    return {name: tensor.clone() for name, tensor in trainer.state().items()}


def test_expired_credentials_are_told_and_training_goes_on(store, trainer, kit, model):
    path = write_checkpoint(URL, copy_state(trainer.state(), place(1)))
    store.is_expired = True
    outcomes = []
    saver = CheckpointSaver(URL, 2, outcomes.append)
    saver.save(trainer.state(), place(2))
    saver.wait()
    (failed,) = outcomes
    assert isinstance(failed, CheckpointFailed)
    assert failed.step == 2
    for attempt in (
        lambda: checkpoint.completed(URL),
        lambda: checkpoint.check_writable(URL),
        lambda: checkpoint.best(URL),
        lambda: restore(kit.make_trainer(model), path, lambda index: None),
    ):
        with pytest.raises(CheckpointError, match=EXPIRED):
            attempt()
    store.is_expired = False
    assert checkpoint.completed(URL) == [1]

    # A checkpoint of another process is seen, although this one has listed the bucket.
    files, root = checkpoint.file_system(URL)
    other = type(files)(**files.storage_options, skip_instance_cache=True)
    other.cp(f"{root}/step-1", f"{root}/step-3", recursive=True)
    assert checkpoint.completed(URL) == [1, 3]


def test_credentials_that_expire_while_it_is_read_are_no_damage(store, trainer, kit, model):
    path = write_checkpoint(URL, copy_state(trainer.state(), place(1)))
    store.is_expired = True
    with pytest.raises(CheckpointError, match=rf"step-1 is out of reach: .*{EXPIRED}"):
        load_shares(path, {})


def test_a_server_that_stays_away_is_told(store, trainer, kit, model, monkeypatch):
    path = write_checkpoint(URL, copy_state(trainer.state(), place(1)))
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    store.stop()
    try:
        for attempt in (
            lambda: checkpoint.completed(URL),
            lambda: restore(kit.make_trainer(model), path, lambda index: None),
            lambda: write_checkpoint(URL, copy_state(trainer.state(), place(2))),
        ):
            with pytest.raises(CheckpointError, match=f"{URL}.*[Cc]onnect"):
                attempt()
        with pytest.raises(CheckpointError, match="step-1 is out of reach"):
            load_shares(path, {})
    finally:
        store.start()


def test_an_answer_that_breaks_off_in_its_middle_is_read_again(store, monkeypatch):
    files, path = checkpoint.file_system(f"{URL}/part")
    files.pipe_file(path, b"content")
    answer, broken = store._app, []

    def break_off(environ, start):
        content = b"".join(answer(environ, start))
        if not broken:
            broken.append(environ["PATH_INFO"])
            yield content[:3]
            raise ConnectionAbortedError
        yield content

    monkeypatch.setattr(store, "_app", break_off)
    assert files.cat_file(path, start=0, end=7) == b"content"
    assert broken == ["/checkpoints/of/a/run/part"]


@pytest.mark.parametrize("part", [".distcp", ".metadata", "complete.json"])
def test_what_was_sent_in_part_is_no_checkpoint(store, trainer, monkeypatch, part):
    write_checkpoint(URL, copy_state(trainer.state(), place(1)))
    # Of each request but one attempt: what fails here fails for good.
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    store.fault = lambda method, path: b"" if method in {"PUT", "POST"} and path.endswith(part) else None
    with pytest.raises(CheckpointError, match=f"no checkpoint at {URL}/step-2: "):
        write_checkpoint(URL, copy_state(trainer.state(), place(2)))
    store.fault = lambda method, path: None
    assert checkpoint.completed(URL) == [1]
    write_checkpoint(URL, copy_state(trainer.state(), place(2)))
    assert checkpoint.completed(URL) == [1, 2]
    store.fault = lambda method, path: b"" if method in {"PUT", "POST"} and path.endswith(part) else None
    with pytest.raises(CheckpointError):
        write_checkpoint(URL, copy_state(trainer.state(), place(2)))
    assert checkpoint.completed(URL) == [1], "the one before was begun to be replaced"
