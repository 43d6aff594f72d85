"""Options of `world-folder`."""

from __future__ import annotations

import attrs

from cosmos_core.config import option
from cosmos_dataset_world.clips import ClipOptions


@attrs.frozen(kw_only=True)
class FolderOptions(ClipOptions):
    """The folders of clips, and the names within them."""

    train: str = option(
        help="Folder of the train clips: `metas/NAME.txt`, `videos/NAME.mp4`, and `images/NAME.png` for images that "
        "are given. `${NAME}` and `${NAME:-default}` stand for environment variables; a relative path starts at the "
        "recipe."
    )
    heldout: str | None = option(None, help="Folder of the held-out clips.")
    embeddings_folder: str = option(
        "text_embedding", help="Where embeddings are, `NAME.safetensors`, within the folder of the clips."
    )

    def __attrs_post_init__(self) -> None:
        ClipOptions.__attrs_post_init__(self)
        if self.heldout is not None and (self.heldout_rows is not None or self.heldout_fraction is not None):
            raise ValueError("give at most one of `heldout`, `heldout_rows` and `heldout_fraction`")
