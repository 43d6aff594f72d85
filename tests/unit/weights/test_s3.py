"""Versions in a bucket, of a server on this machine."""

import re

import fsspec
import pytest
import torch

from cosmos_core.errors import WeightSyncError
from cosmos_core.protocols import TensorSlice
from cosmos_core.transport.directives import WeightTarget
from cosmos_core.weights.digest import digest_of
from cosmos_core.weights.disk import VersionWriter
from cosmos_core.weights.publisher import WeightPublisher
from cosmos_core.weights.receiver import WeightReceiver

torch.set_num_threads(1)

TENSORS = {"w": torch.randn(1500, 1024), "norm": torch.randn(96)}
LAYOUT = {
    rank: [
        (TensorSlice(name="w", start=(0, 512 * rank), shape=(1500, 512)), "float32"),
        (TensorSlice(name="norm", start=(0,), shape=(96,)), "float32"),
    ]
    for rank in (0, 1)
}


@pytest.fixture
def bucket(monkeypatch):
    moto = pytest.importorskip("moto.server", reason="needs moto, which `make` installs")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    files = fsspec.filesystem("s3")
    files.mkdir("weights")
    yield files
    # The next test's server has another port.
    type(files).clear_instance_cache()
    server.stop()


@pytest.fixture
def no_server(monkeypatch, tmp_path):
    """Credentials, and an endpoint at which nobody listens."""
    s3fs = pytest.importorskip("s3fs", reason="needs cosmos-core[s3], which `make` installs")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    s3fs.S3FileSystem.clear_instance_cache()
    yield
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.mark.parametrize(
    ("lacks", "reason"),
    [((), "Could not connect to the endpoint URL"), (("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "credentials")],
)
@pytest.mark.usefixtures("no_server")
def test_a_bucket_out_of_reach_is_told_on_both_sides(monkeypatch, tmp_path, caplog, lacks, reason):
    for name in lacks:
        monkeypatch.delenv(name)
    where = "s3://weights/of/this/run"
    beside = VersionWriter(where, "run", is_only=False, removes=True)
    with WeightPublisher("run", directory=tmp_path, writer=beside) as publisher:
        published = publisher.publish(1, TENSORS, None)
        publisher.retain(1)
    assert re.search(
        rf"version 1 was not stored, training goes on: weights at {where}/run/v1-\w+: .*{reason}", caplog.text
    )
    assert re.search(rf"old versions were not removed: weights at {where}/run: .*{reason}", caplog.text)
    only = VersionWriter(where, "run", is_only=True, removes=False)
    with (
        WeightPublisher("run", directory=tmp_path, writer=only) as publisher,
        pytest.raises(WeightSyncError, match=rf"weights at {where}/run/v1-\w+: .*{reason}"),
    ):
        publisher.publish(1, TENSORS, None)
    target = WeightTarget(version=1, digest=published.digest, sources=(), hosts=())
    with (
        WeightReceiver("disk", run_id="run", host="here", directory=where) as receiver,
        pytest.raises(WeightSyncError, match=rf"weights at {where}/run/v1-{published.digest}: .*{reason}"),
        receiver.fetch(target, LAYOUT, 20),
    ):
        pass


@pytest.mark.slow
def test_a_bucket_holds_versions_that_receivers_read_by_ranges(bucket, tmp_path):
    where = "s3://weights/of/this/run"
    writer = VersionWriter(where, "run", is_only=True, removes=True)
    with WeightPublisher("run", directory=tmp_path, writer=writer) as publisher:
        publisher.publish(1, {"w": TENSORS["w"] + 1}, None)
        published = publisher.publish(2, TENSORS, None)
        publisher.retain(2)
    (kept,) = bucket.ls("weights/of/this/run/run", detail=False)
    assert kept.endswith(f"v2-{published.digest}")

    def fetch():
        target = WeightTarget(version=2, digest=published.digest, sources=(), hosts=())
        loaded = {name: torch.full_like(tensor, torch.nan) for name, tensor in TENSORS.items()}
        receiver = WeightReceiver("disk", run_id="run", host="here", directory=where)
        with receiver, receiver.fetch(target, LAYOUT, 20) as pieces:
            for _, piece, data in pieces:
                place = tuple(slice(s, s + n) for s, n in zip(piece.start, piece.shape, strict=True))
                loaded[piece.name][place] = data
        return digest_of(loaded)

    assert fetch() == published.digest
    content = next(path for path in bucket.ls(kept, detail=False) if path.endswith(".bin"))
    whole = bucket.cat_file(content)
    bucket.pipe_file(content, whole[:5_000_000] + b"\0\0\0\0" + whole[5_000_004:])
    with pytest.raises(WeightSyncError, match=rf"{content}: bytes 4,194,304 to 5,242,880 are not what was written"):
        fetch()
    bucket.pipe_file(content, whole[:5_000_000])
    with pytest.raises(WeightSyncError, match=rf"{content} has 5,000,000 bytes, and 6,14\d,\d+ were written"):
        fetch()
    bucket.rm(content)
    with pytest.raises(WeightSyncError, match=rf"{content} is not there"):
        fetch()
