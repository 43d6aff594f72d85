"""Where a prompt's images and videos stand in its text (see `cosmos_core.models.vision.prompts`)."""

from __future__ import annotations

from collections.abc import Sequence

from cosmos_core.models.vision.prompts import IMAGE_MARK, VIDEO_MARK, filled, with_marks
from cosmos_core.types import Prompt
from cosmos_model_qwen_vl.patches import Seen


def place(prompt: Prompt, seen: Sequence[Seen]) -> Prompt:
    """The prompt with its media's placeholders in the text.

    Raises:
        DataError: There are more marks than media, or fewer, or of the other kind.
    """
    if not seen:
        return prompt
    marked = with_marks(prompt, [VIDEO_MARK if each.step_s else IMAGE_MARK for each in seen])
    return filled(marked, [each.text for each in seen])
