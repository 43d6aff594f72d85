"""Clips for tests: tiny videos, in folders and tars; a cache of their own."""

import io
import tarfile
import tempfile
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest


@lru_cache
def video(frames=4, shade=0, height=16, width=16, fps=8, *, title=None):
    """The bytes of an MP4 file whose index comes first, as of one that is streamed."""
    with tempfile.NamedTemporaryFile(suffix=".mp4") as file:
        _encode(file.name, frames, shade, (height, width), fps, title=title)
        return Path(file.name).read_bytes()


def _encode(path, frames, shade, size, fps, *, title):
    import av

    with av.open(path, "w", format="mp4", options={"movflags": "faststart"}) as container:
        if title:
            container.metadata["title"] = title
        stream = container.add_stream("libx264", rate=fps, options={"preset": "ultrafast"})
        (stream.height, stream.width), stream.pix_fmt = size, "yuv420p"
        stream.thread_count = 1
        rng = np.random.default_rng(shade)
        for _ in range(frames):
            picture = rng.integers(0, 255, (*size, 3), dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def write_clip(folder, name, caption, **kind):
    """Write a clip into a folder; its video is of `kind`."""
    write(folder / "metas" / f"{name}.txt", caption)
    return write(folder / "videos" / f"{name}.mp4", video(**kind))


def write_tar(path, captions, extra=(), **kind):
    """Write a tar of clips, name and caption each, and of members besides; where each member's header is."""
    members = [
        member
        for number, (name, caption) in enumerate(captions.items())
        for member in ((f"{name}.mp4", video(shade=number, **kind)), (f"{name}.txt", caption.encode()))
    ]
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in (*members, *extra):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    with tarfile.open(path) as tar:
        return {info.name: info.offset_data - tarfile.BLOCKSIZE for info in tar}


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """Nothing is kept from one test to the next, or found in the user's cache."""
    monkeypatch.setenv("COSMOS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def clips():
    """What makes clips."""
    return SimpleNamespace(video=video, write=write, write_clip=write_clip, write_tar=write_tar)
