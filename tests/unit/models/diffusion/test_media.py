"""Images and videos of rows: read, fitted, or refused by name."""

import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile

from cosmos_core.errors import DataError
from cosmos_core.models.diffusion import rows
from cosmos_core.models.diffusion.options import DiffusionOptions
from cosmos_core.models.diffusion.rows import FrameReader, fitted, frames_of, pixels_of


def read(location, num_frames=99, *, from_end=False, size=(8, 8), **changes):
    known = {"fps": 24.0, "max_media_bytes": 1 << 20, "max_media_pixels": 1 << 16}
    options = DiffusionOptions(**known | changes, height=size[0], width=size[1])
    return FrameReader(options=options, num_frames=num_frames, from_end=from_end).read(str(location))


def film(number=6, height=8, width=8):
    return np.random.default_rng(0).integers(0, 255, (number, height, width, 3), np.uint8)


@pytest.fixture
def video(tmp_path):
    """12 frames at 24 a second; frame i is grey of level 20 i."""
    av = pytest.importorskip("av")
    path = tmp_path / "clip.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=24)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        for level in range(0, 240, 20):
            frame = av.VideoFrame.from_ndarray(np.full((32, 32, 3), level, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def test_stored_frames_are_read_as_they_are(subtests, tmp_path):
    for number, inline in enumerate([False, True]):
        with subtests.test(inline=inline):
            folder = tmp_path / str(number)
            folder.mkdir()
            frames = film()
            np.save(folder / "film.npy", frames)
            data = base64.b64encode((folder / "film.npy").read_bytes()).decode()
            location = f"data:application/x-npy;base64,{data}" if inline else f"file:{folder}/film.npy"
            assert read(location, num_frames=4).tolist() == frames[:4].tolist()


def test_an_image_is_a_video_of_one_frame(tmp_path):
    Image.fromarray(film(1)[0]).save(tmp_path / "image.png")
    found = read(tmp_path / "image.png")
    assert found.shape == (1, 8, 8, 3)
    assert found[0].tolist() == film(1)[0].tolist()


def test_a_folder_of_images_is_a_video(tmp_path):
    for index, frame in enumerate(film(3)):
        Image.fromarray(frame).save(tmp_path / f"{index:02}.png")
    assert read(tmp_path).tolist() == film(3).tolist()


def test_the_last_frames_of_images_and_arrays(tmp_path):
    (tmp_path / "images").mkdir()
    for index, frame in enumerate(film(3)):
        Image.fromarray(frame).save(tmp_path / "images" / f"{index:02}.png")
    np.save(tmp_path / "film.npy", film(3))
    for name in ("images", "film.npy"):
        found = read(tmp_path / name, num_frames=2, from_end=True)
        assert found.tolist() == film(3)[1:].tolist(), name


def test_frames_are_those_nearest_in_time(video):
    for fps, levels in [(24.0, [0, 20, 40, 60]), (12.0, [0, 40, 80, 120]), (48.0, [0, 0, 20, 40])]:
        found = read(video, num_frames=4, fps=fps)
        for frame, level in zip(found, levels, strict=True):
            assert float(frame.float().mean()) == pytest.approx(level, abs=3)

    for fps, levels in [(24.0, [180, 200, 220]), (12.0, [120, 160, 200])]:
        found = read(video, num_frames=3, fps=fps, from_end=True)
        assert [float(frame.float().mean()) for frame in found] == pytest.approx(levels, abs=3)

    assert len(read(video)) == 12


def test_what_cannot_be_read_is_named(subtests, tmp_path):
    for number, (make, said) in enumerate(
        [
            (lambda folder: str(folder / "none.mp4"), "no such file"),
            (lambda folder: "s3://bucket/clip.mp4", "nothing is fetched while training"),
            (lambda folder: "data:video/mp4,abc", "a data URL is in base64"),
            (lambda folder: "data:video/mp4;base64,a=b", "no base64"),
            (lambda folder: written(folder, b"not a video at all"), "no readable video"),
            (lambda folder: written(folder, b"\x93NUMPY broken"), "no readable .npy"),
            (lambda folder: written(folder, b"\x89PNG broken"), "no readable image"),
            (lambda folder: stored(folder, film().astype(np.float32)), "frames are uint8"),
            (lambda folder: stored(folder, np.zeros((1, 300, 300, 3), np.uint8)), "300 x 300 are more than"),
            (lambda folder: written(folder, bytes(1 << 21)), "2,097,152 bytes are more than the 1,048,576"),
            (lambda folder: str(emptied(folder)), "a folder of 0 images"),
        ]
    ):
        with subtests.test(make=make, said=said):
            folder = tmp_path / str(number)
            folder.mkdir()
            location = make(folder)
            with pytest.raises(DataError, match=said) as told:
                read(location)
            assert location[:40] in str(told.value)


def changing(folder, *sizes):
    """A stream of 4 frames of each size, one after another."""
    av = pytest.importorskip("av")
    parts = []
    for width, height in sizes:
        held = io.BytesIO()
        with av.open(held, "w", format="mpegts") as container:
            stream = container.add_stream("mpeg2video", rate=25)
            stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
            for level in range(0, 120, 30):
                frame = av.VideoFrame.from_ndarray(np.full((height, width, 3), level, np.uint8), format="rgb24")
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
        parts.append(held.getvalue())
    return written(folder, b"".join(parts))


def test_a_video_that_changes_size_is_refused_before_its_frames_are_turned_to_pixels(tmp_path):
    location = changing(tmp_path, (64, 48), (128, 96))
    assert read(location, num_frames=2, fps=25.0, size=(48, 64)).shape == (2, 48, 64, 3)
    with pytest.raises(DataError, match=r"frame \d is 128 x 96, and those before it are 64 x 48"):
        read(location, num_frames=8, fps=25.0, max_media_pixels=64 * 48)


def test_an_npy_header_that_says_more_than_is_there_is_refused(subtests, tmp_path):
    for number, inline in enumerate([False, True]):
        with subtests.test(inline=inline):
            folder = tmp_path / str(number)
            folder.mkdir()
            held = io.BytesIO()
            claimed = {"descr": "|u1", "fortran_order": False, "shape": (1, 10**7, 10**7, 3)}
            np.lib.format.write_array_header_1_0(held, claimed)
            location = written(folder, held.getvalue())
            if inline:
                location = f"data:application/x-npy;base64,{base64.b64encode(held.getvalue()).decode()}"
            with pytest.raises(DataError, match=r"no readable \.npy file: .* with 0 bytes instead of 300000000000000"):
                read(location)


def test_a_large_image_is_not_decoded(tmp_path, monkeypatch):
    Image.new("RGB", (300, 300)).save(tmp_path / "image.png")
    decoded = []
    monkeypatch.setattr(ImageFile.ImageFile, "load", decoded.append)
    for location in (tmp_path / "image.png", tmp_path):
        with pytest.raises(DataError, match="300 x 300 are more than"):
            read(location)
    assert not decoded


def test_a_folder_counts_the_bytes_of_the_images_that_are_wanted(tmp_path):
    for index, frame in enumerate(film(3)):
        Image.fromarray(frame).save(tmp_path / f"{index:02}.png")
    room = sum(file.stat().st_size for file in tmp_path.iterdir()) - 1
    assert len(read(tmp_path, num_frames=2, max_media_bytes=room, max_media_pixels=64)) == 2
    with pytest.raises(DataError, match=f"bytes are more than the {room} of"):
        read(tmp_path, max_media_bytes=room)


def test_frames_are_fitted_one_by_one_and_those_that_are_not_wanted_never(video, monkeypatch):
    whole, sizes = read(video, num_frames=3, size=(32, 32)), []

    def counted(frames, *size):
        sizes.append(len(frames))
        return fitted(frames, *size)

    monkeypatch.setattr(rows, "fitted", counted)
    found = read(video, num_frames=3, size=(8, 12))
    assert torch.equal(found, fitted(whole, 8, 12))
    assert sizes == [1, 1, 1]


def test_a_frame_that_would_be_scaled_beyond_the_limit_is_refused(tmp_path):
    with pytest.raises(DataError, match="frames of 4096 x 1, scaled by 64, are more than the 65,536 pixels"):
        read(stored(tmp_path, np.zeros((1, 1, 4096, 3), np.uint8)), size=(64, 64))


def test_a_pickle_in_numpys_clothes_is_not_opened(tmp_path):
    np.save(tmp_path / "film.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match=r"no readable \.npy"):
        read(tmp_path / "film.npy")


def written(folder, data):
    (folder / "thing").write_bytes(data)
    return str(folder / "thing")


def stored(folder, frames):
    held = io.BytesIO()
    np.save(held, frames)
    return written(folder, held.getvalue())


def emptied(folder):
    (folder / "empty").mkdir()
    return folder / "empty"


def test_pixels_and_frames_are_one_another():
    frames = torch.from_numpy(film())
    pixels = pixels_of(frames)
    assert pixels.shape == (3, 6, 8, 8)
    assert float(pixels.min()) >= -1.0
    assert torch.equal(frames_of(pixels), frames)
    assert frames_of(torch.full((3, 1, 1, 1), 2.0)).tolist() == [[[[255, 255, 255]]]]

    frames = torch.zeros(1, 4, 12, 3, dtype=torch.uint8)
    frames[:, :, 4:8] = 200
    assert (fitted(frames, 4, 4) == 200).all()
    assert fitted(frames, 8, 8).shape == (1, 8, 8, 3)
    assert torch.equal(fitted(frames, 4, 12), frames)
