"""Frozen records that flow between the planes. No torch, no numpy, no I/O."""

from cosmos_core.types.payload import Array, Payload
from cosmos_core.types.prompt import JSON, Message, Prompt, Scalar, ToolCall
from cosmos_core.types.sample import Group, Sample, SampleStatus, WeightVersion

__all__ = [
    "JSON",
    "Array",
    "Group",
    "Message",
    "Payload",
    "Prompt",
    "Sample",
    "SampleStatus",
    "Scalar",
    "ToolCall",
    "WeightVersion",
]
