"""Tars of clips, whole and torn."""

import io
import json
import re
import tarfile
from pathlib import Path

import pytest

from cosmos_core.errors import DataError, StorageError
from cosmos_core.plugins.recipe import dataset_context
from cosmos_core.plugins.selection import PluginSet
from cosmos_dataset_world.webdataset import index
from cosmos_dataset_world.webdataset.members import Member, Torn, walk

CAPTIONS = {"a": "scene a", "b": "scene b", "c": "scene c"}


@pytest.fixture
def made(tmp_path):
    def make(**options):
        plugins = PluginSet.load([("dataset", "world-webdataset")])
        given = {"train": "clips.tar", **options}
        return plugins.create("dataset", "world-webdataset", given, dataset_context(plugins, 0, tmp_path))

    return make


@pytest.fixture
def tar(tmp_path, clips):
    """Where the header of each member of `clips.tar` is."""
    return clips.write_tar(tmp_path / "clips.tar", CAPTIONS)


def texts(dataset):
    return [dataset.row("train", index).text for index in range(dataset.size("train"))]


def edit(path, offset, data):
    content = bytearray(path.read_bytes())
    content[offset : offset + len(data)] = data
    path.write_bytes(content)


def test_a_row_has_a_local_copy_of_its_video(made, tar, clips, cache):
    dataset = made()
    assert not (cache / "world" / "copies").exists()
    row = dataset.row("train", 1)
    assert row.text == "scene b"
    path = Path(row.demonstration)
    assert (path.parent, path.suffix) == (cache / "world" / "copies", ".mp4")
    assert path.read_bytes() == clips.video(shade=1)
    assert row.metadata == {"name": "b", "num_frames": 4, "fps": 8.0, "height": 16, "width": 16}
    assert [each.name for each in path.parent.glob("*.mp4")] == [path.name]


def test_a_tar_is_indexed_once(made, tar, clips, tmp_path, monkeypatch):
    made()
    walked = []
    monkeypatch.setattr(index, "walk", lambda file, size: walked.append(size) or walk(file, size))
    assert texts(made()) == list(CAPTIONS.values())
    assert walked == []
    clips.write_tar(tmp_path / "clips.tar", {"z": "another scene"})
    assert texts(made()) == ["another scene"]
    assert len(walked) == 1


def test_a_broken_header_costs_its_member_and_no_more(made, tar, tmp_path):
    edit(tmp_path / "clips.tar", tar["b.mp4"] + 150, b"\xff" * 4)
    with pytest.raises(DataError, match=r"clips.tar:2: the tar is torn: there is no header of a member \(byte \d+\)"):
        made()
    dataset = made(on_bad_row="skip")
    assert texts(dataset) == ["scene a", "scene c"]
    assert {(each.reason, each.num_rows) for each in dataset.omitted("train")} == {
        ("the tar is torn", 1),
        ("no video", 1),
    }
    # What Python's own reader finds.
    with tarfile.open(tmp_path / "clips.tar") as own:
        assert own.getnames() == ["a.mp4", "a.txt"]


NO_END = "it ends without an end marker"
CUTS = {
    "in a video": ("c.mp4", 512 + 700, "c.mp4 is cut off", 2),
    "before a header": ("c.mp4", 0, NO_END, 2),
    "in a header": ("c.mp4", 100, NO_END, 2),
    "at the end": ("c.txt", 1024, NO_END, 3),
}


def test_a_tar_that_was_cut_off_is_told(made, tar, tmp_path, subtests):
    whole = (tmp_path / "clips.tar").read_bytes()
    for where, (member, behind, reason, num_left) in CUTS.items():
        with subtests.test(where=where):
            (tmp_path / f"{where}.tar").write_bytes(whole[: tar[member] + behind])
            dataset = made(train=f"{where}.tar", on_bad_row="skip")
            assert texts(dataset) == list(CAPTIONS.values())[:num_left]
            (torn,) = (each for each in dataset.omitted("train") if each.reason == "the tar is torn")
            assert reason in torn.first


def test_what_is_behind_an_end_marker_is_told_and_read(made, tar, tmp_path, clips):
    clips.write_tar(tmp_path / "second.tar", {"d": "scene d"})
    path = tmp_path / "clips.tar"
    path.write_bytes(path.read_bytes() + bytes(20480) + (tmp_path / "second.tar").read_bytes())
    dataset = made(on_bad_row="skip")
    assert texts(dataset) == [*CAPTIONS.values(), "scene d"]
    (torn,) = dataset.omitted("train")
    assert "there is more behind an end marker" in torn.first


def test_small_tars_are_read_to_their_end(made, tmp_path, clips, subtests):
    """All is within the zeros that writers pad a tar with."""
    for fault in ["two tars", "a zeroed header"]:
        with subtests.test(fault=fault):
            path = tmp_path / "clips.tar"
            members = [(f"{name}.txt", f"scene {name}".encode()) for name in "abcd"]
            headers = clips.write_tar(path, {}, members)
            if fault == "two tars":
                clips.write_tar(tmp_path / "second.tar", {}, [("e.txt", b"scene e")])
                path.write_bytes(path.read_bytes() + (tmp_path / "second.tar").read_bytes())
                expected = "abcde"
            else:
                edit(path, headers["c.txt"], bytes(512))
                expected = "abd"
            assert path.stat().st_size <= 20480
            with path.open("rb") as file:
                found = list(walk(file, path.stat().st_size))
            assert [each.name.removesuffix(".txt") for each in found if isinstance(each, Member)] == list(expected)
            assert [each.reason for each in found if isinstance(each, Torn)] == ["there is more behind an end marker"]
            with pytest.raises(DataError, match="there is more behind an end marker"):
                made(demonstrations=False, check_videos="never")


def test_a_caption_that_no_one_can_read_costs_its_clip_and_no_more(made, tmp_path, clips, subtests):
    for caption in [b"[" * 300_000, b'{"caption": "\\ud800"}']:
        with subtests.test(caption=caption):
            extra = [
                *(("a.mp4", clips.video()), ("a.json", caption)),
                *(("b.mp4", clips.video()), ("b.json", b'{"caption": "scene b"}')),
            ]
            clips.write_tar(tmp_path / "clips.tar", {}, extra)
            dataset = made(caption="json:caption", on_bad_row="skip")
            assert texts(dataset) == ["scene b"]
            assert [each.reason for each in dataset.omitted("train")] == ["the caption cannot be read"]


def test_a_compressed_tar_is_refused(made, tmp_path):
    with tarfile.open(tmp_path / "clips.tar", "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("a.txt"))
    with pytest.raises(DataError, match="it is compressed, so that members cannot be read by themselves; unpack it"):
        made()


def test_a_member_twice_and_other_faults_are_counted(made, tmp_path, clips):
    extra = [
        *(("d.mp4", clips.video()), ("d.webm", b"film"), ("d.txt", b"scene d")),
        *(("e.mp4", clips.video()), ("e.txt", b"\xff")),
        *(("f.txt", b"scene f"), ("f.other", b"whatever")),
        *(("g.mp4", b""), ("g.txt", b"scene g")),
        *(("h.mp4", clips.video() + bytes(1000)), ("h.txt", b"scene h")),
    ]
    clips.write_tar(tmp_path / "clips.tar", {"a": "scene a"}, extra)
    dataset = made(on_bad_row="skip", max_video_bytes=len(clips.video()) + 500)
    assert {each.reason for each in dataset.omitted("train")} == {
        "two members are its video",
        "the caption cannot be read",
        "no video",
        "a video is empty",
        "a video is above max_video_bytes",
    }


def test_a_video_that_cannot_be_read_is_told_when_its_turn_comes(made, tmp_path, clips):
    clips.write_tar(tmp_path / "clips.tar", {"a": "scene a"}, [("b.mp4", b"film"), ("b.txt", b"scene b")])
    dataset = made()
    with pytest.raises(DataError, match=r"clips.tar: \w+.mp4 cannot be read: Invalid data"):
        dataset.row("train", 1)
    short = made(min_frames=5)
    with pytest.raises(DataError, match=r"a.mp4 is too short: 4 frames, fewer than min_frames, 5"):
        short.row("train", 0)


def test_a_tar_that_changes_meanwhile_is_told(made, tar, tmp_path, clips):
    dataset = made()
    clips.write_tar(tmp_path / "clips.tar", {"first": "a scene that comes before", **CAPTIONS})
    with pytest.raises(StorageError, match=r"clips.tar: byte \d+ has another member than before; the tar was changed"):
        dataset.row("train", 2)


def test_a_negative_size_ends_no_walk_in_a_loop(made, tar, tmp_path):
    path = tmp_path / "clips.tar"
    place = tar["b.mp4"]
    block = bytearray(path.read_bytes()[place : place + 512])
    block[124:136] = b"\xff" * 10 + b"\xfc\x00"
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    edit(path, place, bytes(block))
    assert texts(made(on_bad_row="skip")) == ["scene a", "scene c"]


def test_a_name_that_is_no_text_can_be_sent(made, tmp_path, clips):
    clips.write_tar(
        tmp_path / "clips.tar", {"a": "scene a"}, [("\udcff.mp4", clips.video()), ("\udcff.txt", b"scene b")]
    )
    row = made().row("train", 1)
    assert row.text == "scene b"
    assert row.metadata["name"] == "\\xff"


def test_captions_are_fields_where_asked_for(made, tmp_path, clips):
    def member(name, **fields):
        return (f"{name}.mp4", clips.video()), (f"{name}.json", json.dumps(fields).encode())

    extra = [*member("a", prompt="scene a"), *member("b", caption="scene b")]
    clips.write_tar(tmp_path / "clips.tar", {}, extra)
    dataset = made(caption="json:prompt", on_bad_row="skip")
    assert texts(dataset) == ["scene a"]
    (bad,) = dataset.omitted("train")
    assert "b.json: it has no text in the field 'prompt'" in bad.first


def test_ranges_and_globs_take_several_tars(made, tmp_path, clips):
    for shard in range(9, 12):
        clips.write_tar(tmp_path / f"{shard:03}.tar", {str(shard): f"scene {shard}"})
    assert texts(made(train="{009..011}.tar")) == ["scene 9", "scene 10", "scene 11"]
    assert texts(made(train="01*.tar")) == ["scene 10", "scene 11"]
    with pytest.raises(DataError, match=r"the range \{3\.\.1\} counts down"):
        made(train="{3..1}.tar")
    with pytest.raises(DataError, match=re.escape(f"no file at {tmp_path}/012.tar")):
        made(train="{011..012}.tar")


def test_every_form_of_tar_is_walked_as_python_walks_it(subtests):
    for form in [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]:
        with subtests.test(form=form):
            buffer = io.BytesIO()
            long = "folder/" * (20 if form != tarfile.USTAR_FORMAT else 5) + "ä" * (
                60 if form != tarfile.USTAR_FORMAT else 10
            )
            with tarfile.open(fileobj=buffer, mode="w", format=form, encoding="utf-8") as tar:
                for name, size in (("first.txt", 3), (f"{long}.mp4", 513), ("empty", 0), ("last.txt", 1024)):
                    info = tarfile.TarInfo(name)
                    info.size, info.mtime = size, 1.5 if form == tarfile.PAX_FORMAT else 1
                    tar.addfile(info, io.BytesIO(bytes(size)))
                folder = tarfile.TarInfo("folder")
                folder.type = tarfile.DIRTYPE
                tar.addfile(folder)
                link = tarfile.TarInfo("link")
                link.type, link.linkname = tarfile.SYMTYPE, "a" * (150 if form != tarfile.USTAR_FORMAT else 50)
                tar.addfile(link)
                tar.addfile(tarfile.TarInfo("after"))
            found = list(walk(buffer, len(buffer.getvalue())))
            assert not [each for each in found if isinstance(each, Torn)]
            buffer.seek(0)
            with tarfile.open(fileobj=buffer) as tar:
                assert found == [
                    Member(name=info.name, offset=info.offset_data, size=info.size, checksum=info.chksum)
                    for info in tar
                    if info.isreg()
                ]
