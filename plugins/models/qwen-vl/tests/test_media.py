"""Reading what a prompt shows: files, folders, videos, data URLs, and all that is no media."""

import base64
import sys

import av
import numpy as np
import pytest
from PIL import Image

from cosmos_core.errors import DataError
from cosmos_model_qwen_vl.media import Sampling, Still, Video, load
from cosmos_model_qwen_vl.tiny import data_url, film, picture

SAMPLING = Sampling(fps=2.0, max_frames=6, folder_fps=2.0)


def grey(number):
    return Image.new("RGB", (32, 16), (number * 20,) * 3)


@pytest.fixture
def video(tmp_path):
    """Ten frames at five a second, each brighter than the one before."""
    path = tmp_path / "film.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=5)
        stream.width, stream.height, stream.pix_fmt = 32, 16, "yuv420p"
        for number in range(10):
            container.mux(stream.encode(av.VideoFrame.from_image(grey(number))))
        container.mux(stream.encode())
    return path


def test_an_image_from_a_path_or_a_file_url(tmp_path, subtests):
    for name in ["a.png", "a b.jpg"]:
        with subtests.test(name=name):
            path = tmp_path / name
            picture(20, 10).save(path)
            for location in (str(path), path.as_uri()):
                shown = load(location, SAMPLING)
                assert isinstance(shown, Still)
                assert shown.image.size == (20, 10)
                assert shown.image.mode == "RGB"


def test_an_image_in_a_data_url():
    image = picture(20, 10)
    assert np.array_equal(load(data_url(image), SAMPLING).image, image)


def test_a_video_file(video):
    shown = load(str(video), SAMPLING)
    assert isinstance(shown, Video)
    assert shown.times_s == [number / 5 for number in (0, 3, 6, 9)]
    assert shown.fps == 4 / 10 * 5
    for frame, number in zip(shown.frames, (0, 3, 6, 9), strict=True):
        assert np.asarray(frame).mean() == pytest.approx(20 * number, abs=8)


def test_an_animation_is_a_video_and_a_still_gif_an_image(tmp_path):
    frames = [grey(number) for number in range(8)]
    frames[0].save(tmp_path / "film.gif", save_all=True, append_images=frames[1:], duration=250, loop=0)
    frames[0].save(tmp_path / "still.gif")
    shown = load(str(tmp_path / "film.gif"), SAMPLING)
    assert shown.times_s == [number / 4 for number in (0, 2, 5, 7)]
    assert np.asarray(shown.frames[3]).mean() == pytest.approx(140, abs=2)
    assert isinstance(load(str(tmp_path / "still.gif"), SAMPLING), Still)
    # In a row itself, too.
    for name, kind in [("film.gif", Video), ("still.gif", Still)]:
        inline = load(f"data:image/gif;base64,{base64.b64encode((tmp_path / name).read_bytes()).decode()}", SAMPLING)
        assert isinstance(inline, kind)
        if kind is Video:
            assert inline.times_s == shown.times_s
            assert np.array_equal(inline.frames[3], shown.frames[3])


def test_a_folder_of_frames_is_a_video_in_the_order_of_names(tmp_path):
    location = film(tmp_path / "film", 9, 16, 8)
    shown = load(location, SAMPLING)
    assert shown.times_s == [number / 2 for number in (0, 2, 3, 5, 6, 8)]
    assert np.array_equal(shown.frames[1], picture(16, 8, seed=2))


def test_frames_are_spread_over_the_whole_length(subtests):
    for num_frames, native_fps, expected in [(3, 2.0, 3), (100, 25.0, 6), (100, 50.0, 4), (100, 40.0, 5), (1, 24.0, 1)]:
        with subtests.test(num_frames=num_frames, native_fps=native_fps, expected=expected):
            chosen = SAMPLING.choose(num_frames, native_fps)
            assert len(set(chosen)) == len(chosen) == expected
            assert (chosen[0], chosen[-1]) == (0, num_frames - 1)


def test_what_cannot_be_read_is_told(subtests):
    for location, message in [
        ("nowhere/a.png", "no such file or folder"),
        ("https://example.org/a.png", "nothing is fetched"),
        ("data:text/plain,hello", "is an image in base64"),
        ("data:image/png;base64,@@", "no base64"),
        ("data:image/png;base64,AAAA", "no readable image"),
        ("data:image/gif;base64,AAAA", "no readable animation"),
        ("data:image/gif,AAAA", "is an animation in base64"),
    ]:
        with subtests.test(location=location, message=message), pytest.raises(DataError, match=message):
            load(location, SAMPLING)


def test_a_broken_file_is_told(tmp_path, subtests):
    for name in ["a.png", "a.gif", "a.mp4"]:
        with subtests.test(name=name):
            (tmp_path / name).write_bytes(b"neither image nor video")
            with pytest.raises(DataError, match=f"{name}.*no readable"):
                load(str(tmp_path / name), SAMPLING)


def test_a_cut_image_is_told(tmp_path):
    picture(400, 300).save(tmp_path / "a.png")
    data = (tmp_path / "a.png").read_bytes()
    (tmp_path / "a.png").write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match="no readable image"):
        load(str(tmp_path / "a.png"), SAMPLING)


def test_folders_that_are_no_video_are_told(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="without any"):
        load(str(tmp_path / "empty"), SAMPLING)
    film(tmp_path / "mixed", 3, 16, 8)
    picture(8, 8).save(tmp_path / "mixed" / "001.png")
    with pytest.raises(DataError, match="different sizes"):
        load(str(tmp_path / "mixed"), SAMPLING)


def test_a_location_of_millions_of_characters_is_cut_in_messages():
    with pytest.raises(DataError) as caught:
        load("data:image/png;base64," + "A" * 100_000, SAMPLING)
    assert len(str(caught.value)) < 400


def test_video_files_need_pyav(video, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(DataError, match=r"pip install 'cosmos-model-qwen-vl\[video\]'"):
        load(str(video), SAMPLING)
