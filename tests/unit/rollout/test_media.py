"""Media of held-out samples in the run's folder."""

import sys

import numpy as np
import pytest
from PIL import Image

from cosmos_core.rollout.media import KEPT_ROWS, MediaWriter
from cosmos_core.types import Array, Payload


def media(num_frames=3, height=4, width=6, fps=8.0):
    frames = np.random.default_rng(0).integers(0, 255, (num_frames, height, width, 3), np.uint8)
    rate = np.array(fps, np.float32)
    arrays = {
        "frames": Array(dtype="uint8", shape=frames.shape, data=frames.tobytes()),
        "fps": Array(dtype="float32", shape=(), data=rate.tobytes()),
    }
    return Payload(kind="media", arrays=arrays)


def size_of(path):
    with Image.open(path) as image:
        return image.size


def test_a_video_is_kept_with_a_strip_of_its_frames(tmp_path):
    av = pytest.importorskip("av")
    place = MediaWriter(tmp_path).keep(5, 3, media())
    assert place == "media/step-5/row-3.mp4"
    with av.open(str(tmp_path / place)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        assert container.streams.video[0].average_rate == 8
    assert [frame.shape for frame in frames] == [(64, 96, 3)] * 3
    assert size_of(tmp_path / "media/step-5/row-3.strip.webp") == (3 * 96, 64)
    assert sorted(path.name for path in (tmp_path / "media/step-5").iterdir()) == ["row-3.mp4", "row-3.strip.webp"]


def test_without_pyav_a_video_is_an_animated_image(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    place = MediaWriter(tmp_path).keep(5, 3, media(fps=float("nan")))
    assert place == "media/step-5/row-3.webp"
    with Image.open(tmp_path / place) as image:
        assert image.n_frames == 3


def test_one_frame_is_an_image_as_it_is(tmp_path):
    seen = media(num_frames=1, height=70, width=81)
    place = MediaWriter(tmp_path).keep(0, 0, seen)
    assert place == "media/step-0/row-0.png"
    with Image.open(tmp_path / place) as image:
        assert np.asarray(image).tobytes() == seen.arrays["frames"].data


def test_a_long_video_has_a_strip_of_bounded_size(tmp_path):
    MediaWriter(tmp_path).keep(0, 0, media(num_frames=12, height=100, width=200))
    assert size_of(tmp_path / "media/step-0/row-0.strip.webp") == (8 * 160, 80)


def test_rows_beyond_the_first_are_not_kept(tmp_path):
    assert MediaWriter(tmp_path).keep(0, KEPT_ROWS, media()) == ""
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_to_is_told_once_and_ends_nothing(tmp_path, caplog):
    (tmp_path / "media").write_text("in the way")
    writer = MediaWriter(tmp_path)
    assert [writer.keep(0, row, media()) for row in range(3)] == [""] * 3
    (told,) = caplog.messages
    assert "media of held-out samples are not kept: media/step-0/row-0 cannot be written" in told
