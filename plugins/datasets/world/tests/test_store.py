"""Tars on S3, of a server on this machine that refuses, and goes away and comes back."""

import logging
import os
import time
from pathlib import Path

import pytest

from cosmos_core.errors import StorageError
from cosmos_core.plugins.recipe import dataset_context
from cosmos_core.plugins.selection import PluginSet

pytest.importorskip("moto", reason="needs moto, which `make` installs")
pytest.importorskip("s3fs", reason="needs cosmos-core[s3], which `make` installs")

CAPTIONS = {f"{number:02}": f"scene {number}" for number in range(4)}


@pytest.fixture(scope="module")
def server():
    from tests.buckets import BucketServer

    server = BucketServer()
    server.start()
    server.make_bucket("clips")
    yield server
    server.stop()


@pytest.fixture
def store(server, monkeypatch):
    """The server, asked with the credentials of checkpoints."""
    for name, value in server.credentials.items():
        monkeypatch.setenv(name, value)
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    server.is_expired = False
    server.requests.clear()
    yield server
    server.is_expired = False


@pytest.fixture
def sent(store, tmp_path, clips):
    """Send a tar of clips."""
    from cosmos_core.storage import file_system

    def send(name="000.tar", captions=CAPTIONS, damage=lambda content, tar: content, **kind):
        tar = clips.write_tar(tmp_path / name, captions, **kind)
        files, path = file_system(f"s3://clips/{name}")
        files.pipe_file(path, damage((tmp_path / name).read_bytes(), tar))
        return tar

    return send


@pytest.fixture
def made(tmp_path):
    def make(**options):
        plugins = PluginSet.load([("dataset", "world-webdataset")])
        given = {"train": "s3://clips/000.tar", **options}
        return plugins.create("dataset", "world-webdataset", given, dataset_context(plugins, 0, tmp_path))

    return make


def texts(dataset):
    return [dataset.row("train", index).text for index in range(dataset.size("train"))]


def test_members_are_read_by_range_and_once(sent, made, store, clips):
    sent(height=64, width=64, frames=8)
    dataset = made()
    store.requests.clear()
    path = Path(dataset.row("train", 2).demonstration)
    assert path.read_bytes() == clips.video(shade=2, height=64, width=64, frames=8)
    assert {(method, where) for method, where, _ in store.requests} == {("GET", "/clips/000.tar")}
    ranges = [tuple(map(int, each.removeprefix("bytes=").split("-"))) for _, _, each in store.requests]
    assert sum(last - first + 1 for first, last in ranges) == path.stat().st_size + 512
    store.requests.clear()
    assert dataset.row("train", 2).demonstration == str(path)
    made()
    assert [method for method, _, _ in store.requests] == ["HEAD"]


def test_a_broken_member_is_counted_and_the_rest_is_read(sent, made, store):
    def damage(content, tar):
        place = tar["02.mp4"] + 150
        return content[:place] + b"\xff" * 4 + content[place + 4 :]

    sent(damage=damage)
    dataset = made(on_bad_row="skip")
    assert texts(dataset) == ["scene 0", "scene 1", "scene 3"]
    assert {(each.reason, each.num_rows) for each in dataset.omitted("train")} == {
        ("the tar is torn", 1),
        ("no video", 1),
    }


def test_globs_are_listed(sent, made, store):
    for name in ("g-1.tar", "g-0.tar"):
        sent(name, {name[:3]: f"scene {name}"})
    assert texts(made(train="s3://clips/g-*.tar")) == ["scene g-0.tar", "scene g-1.tar"]


@pytest.mark.nightly
def test_a_server_that_goes_away_for_five_seconds_costs_time_alone(sent, made, store):
    sent()
    start = time.monotonic()
    with store.away(5.0):
        dataset = made()
        assert time.monotonic() - start > 4.5
    with store.away(1.0):
        assert texts(dataset) == list(CAPTIONS.values())


def test_expired_credentials_end_it_with_their_names(sent, made, store, caplog):
    sent()
    dataset = made()
    store.is_expired = True
    secret = store.credentials["PROD_S3_CHECKPOINT_SECRET_ACCESS_KEY"]
    store.requests.clear()
    told = r"s3://clips/000.tar: .* \(403: refused\); the credentials have expired.*PROD_S3_CHECKPOINT_ACCESS_KEY"
    with caplog.at_level(logging.DEBUG):
        for attempt in (lambda: dataset.row("train", 0), made):
            with pytest.raises(StorageError, match=told) as caught:
                attempt()
            assert secret not in str(caught.value)
    assert len(store.requests) <= 4, "what is refused is not asked again and again"
    assert secret not in caplog.text
    store.is_expired = False
    assert texts(dataset) == list(CAPTIONS.values())


def test_a_tar_that_is_not_there_is_told(made, store):
    with pytest.raises(StorageError, match=r"s3://clips/404.tar: .*(404|[Nn]o such|NoSuchKey|Not Found|clips/404.tar)"):
        made(train="s3://clips/404.tar")
