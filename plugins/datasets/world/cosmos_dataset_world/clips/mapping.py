"""The mapping of a clip to a prompt, or the reason why there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cosmos_core.data import BadRowError
from cosmos_core.storage import cache_folder
from cosmos_core.types import JSON, Prompt
from cosmos_dataset_world.clips.cache import LocalCache
from cosmos_dataset_world.clips.clip import PICKLES, Clip, Part
from cosmos_dataset_world.clips.embeddings import usable_embedding
from cosmos_dataset_world.clips.options import ClipOptions
from cosmos_dataset_world.clips.probing import Prober


def copies(options: ClipOptions) -> LocalCache:
    """The local copies of clips, in a folder that all datasets of clips of this user share."""
    return LocalCache(cache_folder() / "world" / "copies", options.max_cache_bytes)


class ClipMapping:
    """The mapping of `ClipOptions`.

    Args:
        options: What a row needs.
        prober: Looks into videos.
        cache: For embeddings that are converted.
    """

    def __init__(self, options: ClipOptions, prober: Prober, cache: LocalCache) -> None:
        self._options = options
        self._prober = prober
        self._cache = cache

    def prompt(self, row: Any, folder: Path) -> Prompt:  # noqa: ARG002 - paths of clips are absolute
        """The prompt of a `Clip`; of one that is not fetched, what is known before.

        Raises:
            BadRowError: The clip cannot be used, and why.
        """
        clip: Clip = row
        options = self._options
        metadata: dict[str, JSON] = {"name": clip.name}
        text = _caption(clip)
        if options.needs_video:
            metadata |= self._video(clip)
        if options.given == "image":
            _image(clip)
        embedding = self._embedding(clip)
        if embedding:
            metadata["text_embedding"] = embedding
        given = {"nothing": None, "image": clip.image, "frames": clip.video}[options.given]
        if given is not None:
            metadata["num_given_frames"] = options.given_frames
        if options.given == "frames":
            # Of the clip itself, whether or not it is a demonstration, too.
            metadata["given_from"] = "start"
        return Prompt(
            text=text,
            demonstration=_location(clip.video) if options.demonstrations else None,
            media=() if given is None else (_location(given),),
            metadata=metadata,
        )

    def _video(self, clip: Clip) -> dict[str, JSON]:
        video, options = clip.video, self._options
        if video is None:
            raise BadRowError(f"{clip.name} has no video", "no video")
        if video.size_bytes == 0:
            raise BadRowError(f"{video.name} is empty", "a video is empty")
        _at_most(video, "bytes", video.size_bytes, "max_video_bytes", options.max_video_bytes)
        if video.path is None or options.check_videos == "never":
            return {}
        found = self._prober.probe(video.path)
        least = max(options.min_frames, options.given_frames if options.given == "frames" else 1)
        if found.num_frames < least:
            name = "min_frames" if least == options.min_frames else "given_frames"
            raise BadRowError(
                f"{video.name} is too short: {found.num_frames} frames, fewer than {name}, {least}",
                f"a video is shorter than {name}",
            )
        _at_most(video, "frames", found.num_frames, "max_frames", options.max_frames)
        pixels = f"pixels a frame ({found.width} x {found.height})"
        _at_most(video, pixels, found.height * found.width, "max_pixels", options.max_pixels)
        return {
            "num_frames": found.num_frames,
            "fps": found.fps,
            "height": found.height,
            "width": found.width,
        }

    def _embedding(self, clip: Clip) -> str:
        """The path of the embedding; empty if there is none."""
        part, options = clip.embedding, self._options
        if options.embeddings == "ignored":
            return ""
        if part is None:
            if options.embeddings == "required":
                raise BadRowError(f"{clip.name} has no embedding of its caption", "no embedding")
            return ""
        if part.name.endswith(PICKLES) and not options.pickles:
            raise BadRowError(
                f"{part.name} is a pickle, and none is read: convert it to safetensors, or set the option `pickles`",
                "an embedding is a pickle",
            )
        if part.path is None:
            return part.name
        return str(usable_embedding(part.path, options.embedding_width, self._cache))


def _caption(clip: Clip) -> str:
    if clip.caption is None:
        raise BadRowError(f"{clip.name} has no caption: there is no {clip.caption_name}", "no caption")
    text = clip.caption.strip()
    if not text:
        raise BadRowError(f"{clip.caption_name} is empty", "a caption is empty")
    return text


def _image(clip: Clip) -> None:
    if clip.image is None:
        raise BadRowError(f"{clip.name} has no image, which is to be given", "no image")
    if clip.image.size_bytes == 0:
        raise BadRowError(f"{clip.image.name} is empty", "an image is empty")


def _at_most(video: Part, what: str, found: int, name: str, most: int | None) -> None:
    if most is not None and found > most:
        raise BadRowError(f"{video.name} has {found:,} {what}, more than {name}, {most:,}", f"a video is above {name}")


def _location(part: Part | None) -> str:
    assert part is not None
    return part.name if part.path is None else str(part.path)
