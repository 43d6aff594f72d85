"""Images of requests: `data:` URLs of a bounded size. Nothing is fetched, and no file is read, for a stranger."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping
from typing import Any, Final

from cosmos_core.rollout.endpoint.calls import CallError

_FORMATS: Final = ("PNG", "JPEG", "WEBP")
_MOST_BYTES: Final = 16 << 20
_MOST_PIXELS: Final = 4096 * 4096


def image_of(part: Mapping[str, Any], where: str, param: str) -> str:
    """The location of the image of a part `image_url` or `input_image`, looked at no further than its size.

    Raises:
        CallError: It is none that can be seen here.
    """
    given = part.get("image_url")
    url = given.get("url") if isinstance(given, Mapping) else given
    if not isinstance(url, str):
        raise CallError(400, f"{where}: an image without `image_url`; send it as a data: URL there", param=param)
    head, _, data = url.partition(",")
    if not head.startswith("data:image/") or not head.endswith(";base64"):
        words = f"{where}: the image {url!r:.80} is no data: URL in base64, and nothing is fetched here; send it as one"
        raise CallError(400, words, code="invalid_image_url", param=param)
    try:
        held = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise CallError(400, f"{where}: the image is no base64: {error}", code="invalid_base64", param=param) from error
    width, height = _size(held, where, param)
    if len(held) > _MOST_BYTES or width * height > _MOST_PIXELS:
        words = (
            f"{where}: an image of {len(held)} bytes and {width} x {height} pixels; the most are {_MOST_BYTES} and "
            f"{_MOST_PIXELS}, so scale it down or crop it"
        )
        raise CallError(400, words, code="image_too_large", param=param)
    return url


def _size(held: bytes, where: str, param: str) -> tuple[int, int]:
    from PIL import Image  # noqa: PLC0415 - of no use to models of text

    try:
        with Image.open(io.BytesIO(held), formats=_FORMATS) as image:
            return image.size
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise CallError(400, f"{where}: {error}", code="image_too_large", param=param) from error
    except (OSError, ValueError, SyntaxError) as error:
        words = f"{where}: the image cannot be read as one of {', '.join(_FORMATS)}: {error}"
        raise CallError(400, words, code="invalid_image", param=param) from error
