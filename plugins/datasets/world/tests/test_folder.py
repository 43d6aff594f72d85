"""Folders of clips, sound and not."""

import logging
import os
import re
import shutil

import pytest

from cosmos_core.errors import ConfigError, DataError
from cosmos_core.plugins.recipe import dataset_context
from cosmos_core.plugins.selection import PluginSet
from cosmos_dataset_world.clips import probing


@pytest.fixture
def made(tmp_path):
    def make(**options):
        plugins = PluginSet.load([("dataset", "world-folder")])
        return plugins.create(
            "dataset", "world-folder", {"train": "clips", **options}, dataset_context(plugins, 0, tmp_path)
        )

    return make


@pytest.fixture
def folder(tmp_path, clips):
    """Clips `a` and `b`, of 4 frames each."""
    for number, name in enumerate("ab"):
        clips.write_clip(tmp_path / "clips", name, f" scene {name}\n", frames=4, shade=number)
    return tmp_path / "clips"


def test_a_row_has_the_caption_and_where_the_video_is(made, folder):
    dataset = made()
    assert dataset.size("train") == 2
    row = dataset.row("train", 1)
    assert row.text == "scene b"
    assert row.demonstration == str(folder / "videos" / "b.mp4")
    assert row.media == ()
    assert row.metadata == {"name": "b", "num_frames": 4, "fps": 8.0, "height": 16, "width": 16}


def test_what_is_given_is_in_the_media(made, folder, clips):
    assert made(given="frames", given_frames=2).row("train", 0).media == (str(folder / "videos" / "a.mp4"),)
    clips.write(folder / "images" / "a.png", b"picture")
    row = made(given="image", demonstrations=False, on_bad_row="skip").row("train", 0)
    assert (row.demonstration, row.media) == (None, (str(folder / "images" / "a.png"),))
    assert row.metadata == {"name": "a", "num_given_frames": 1}


def cut(path):
    path.write_bytes(path.read_bytes()[:-400])


def edited(path, content=b""):
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)


FAULTS = {
    "no caption": (lambda f: (f / "metas" / "b.txt").unlink(), {}, "b has no caption: there is no metas/b.txt"),
    "a caption is empty": (lambda f: edited(f / "metas" / "b.txt", b" \n"), {}, "metas/b.txt is empty"),
    "a caption cannot be read": (lambda f: edited(f / "metas" / "b.txt", b"\xff"), {}, "metas/b.txt cannot be read as"),
    "no video": (lambda f: (f / "videos" / "b.mp4").unlink(), {}, "b has no video"),
    "a video is empty": (lambda f: edited(f / "videos" / "b.mp4"), {}, "videos/b.mp4 is empty"),
    "a video cannot be read": (lambda f: edited(f / "videos" / "b.mp4", b"film"), {}, "b.mp4 cannot be read: Invalid"),
    "a video is cut off": (lambda f: cut(f / "videos" / "b.mp4"), {}, "b.mp4 is cut off"),
    "two files of one name": (
        lambda f: edited(f / "videos" / "b.webm"),
        {},
        "videos/b.mp4 and videos/b.webm are of one",
    ),
    "a video is shorter than min_frames": (
        lambda f: None,
        {"min_frames": 5},
        "too short: 4 frames, fewer than min_frames",
    ),
    "a video is shorter than given_frames": (
        lambda f: None,
        {"given": "frames", "given_frames": 9},
        "too short: 4 frames, fewer than given_frames, 9",
    ),
    "a video is above max_frames": (lambda f: None, {"max_frames": 3}, "4 frames, more than max_frames, 3"),
    "a video is above max_pixels": (
        lambda f: None,
        {"max_pixels": 100},
        r"256 pixels a frame \(16 x 16\), more than max_pixels, 100",
    ),
    "a video is above max_video_bytes": (
        lambda f: edited(f / "videos" / "b.mp4", bytes(1 << 16)),
        {"max_video_bytes": 1 << 15},
        "65,536 bytes, more than max_video_bytes, 32,768",
    ),
}


def test_a_bad_clip_is_refused_or_counted(made, folder, cache, caplog, subtests):
    whole = folder.with_name("whole")
    shutil.copytree(folder, whole)
    for kind, (fault, options, message) in FAULTS.items():
        with subtests.test(kind=kind):
            shutil.rmtree(folder)
            shutil.copytree(whole, folder)
            shutil.rmtree(cache, ignore_errors=True)
            caplog.clear()
            fault(folder)
            with pytest.raises(DataError, match=rf"clips:\d+: .*{message}.*on_bad_row = 'skip'"):
                made(**options)
            is_bad_for_all = kind.startswith(("a video is above max_p", "a video is above max_f", "a video is shorter"))
            if is_bad_for_all:
                with pytest.raises(DataError, match=rf"no usable rows \(2 skipped: 2 x {kind}\)"):
                    made(on_bad_row="skip", **options)
                continue
            with caplog.at_level(logging.WARNING):
                dataset = made(on_bad_row="skip", **options)
            assert [dataset.row("train", 0).text] == ["scene a"]
            ((omission),) = dataset.omitted("train")
            assert (omission.reason, omission.num_rows) == (kind, 1)
            assert re.search(message, omission.first)
            assert "1 row(s) left out" in caplog.text


def test_a_title_may_be_in_any_encoding(made, folder, clips):
    clips.write(folder / "videos" / "b.mp4", clips.video(title="xxxx").replace(b"xxxx", b"\xe9 \xe9 "))
    assert made().size("train") == 2


def test_a_last_frame_that_lacks_a_few_bytes_is_told(made, folder):
    path = folder / "videos" / "b.mp4"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(DataError, match=r"b.mp4 is cut off in frame 3"):
        made()


def test_a_name_that_cannot_be_sent_is_counted(made, folder):
    (folder / "metas" / os.fsdecode(b"\xff.txt")).write_text("scene")
    dataset = made(on_bad_row="skip")
    assert dataset.size("train") == 2
    assert [each.reason for each in dataset.omitted("train")] == ["a name that cannot be shown"]


def test_every_frame_is_decoded_where_asked_for(made, folder):
    path = folder / "videos" / "b.mp4"
    content = bytearray(path.read_bytes())
    content[-200:] = bytes(200)
    path.write_bytes(content)
    assert made().size("train") == 2
    assert made(check_videos="frames", on_bad_row="skip").size("train") == 1


def test_rows_are_checked_when_they_are_read_where_asked_for(made, folder):
    cut(folder / "videos" / "b.mp4")
    dataset = made(check_rows="when-read")
    assert dataset.row("train", 0).text == "scene a"
    with pytest.raises(DataError, match=r"clips: row 1: b.mp4 is cut off"):
        dataset.row("train", 1)


def test_a_video_that_changes_after_the_check_is_told(made, folder):
    dataset = made()
    (folder / "videos" / "b.mp4").write_bytes(b"film")
    with pytest.raises(DataError, match=r"usable row 1: b.mp4 cannot be read: .*; it changed since the run began"):
        dataset.row("train", 1)


def test_videos_are_looked_into_once_for_all_processes(made, folder, clips, monkeypatch):
    made()
    probing._looked_into.cache_clear()
    looked = []
    look = probing._contents
    monkeypatch.setattr(probing, "_contents", lambda *given: looked.append(given[2]) or look(*given))
    made()
    assert looked == []
    clips.write_clip(folder, "b", "scene b", frames=6, shade=9)
    assert made().row("train", 1).metadata["num_frames"] == 6
    assert looked == ["b.mp4"]


def test_rows_that_are_not_read_need_no_library(made, folder, monkeypatch):
    monkeypatch.setattr(probing.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"check_videos: 'packets' needs PyAV.*cosmos-dataset-world\[video\]"):
        made()
    assert made(check_videos="never").row("train", 0).metadata == {"name": "a"}


def test_a_folder_that_is_none_is_refused(made, folder):
    with pytest.raises(DataError, match=r"other/metas: No such file.*metas/NAME.txt and videos/NAME.mp4"):
        made(train="other")
    (folder / "metas").rename(folder / "captions")
    with pytest.raises(DataError, match="clips/metas: No such file"):
        made()
