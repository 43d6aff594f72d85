"""A clip: its caption and its files, what is wrong with them, and the prompt that they make."""

from cosmos_dataset_world.clips.clip import Clip, Part
from cosmos_dataset_world.clips.mapping import ClipMapping, copies
from cosmos_dataset_world.clips.options import ClipOptions

__all__ = ["Clip", "ClipMapping", "ClipOptions", "Part", "copies"]
