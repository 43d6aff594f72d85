"""Messages to bytes and back: `[class name, fields]` in MessagePack, decoded strictly.

Unknown classes, missing fields and wrong types raise `TransportError`; nothing is coerced.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from cosmos_core.errors import TransportError

_ENVELOPE: Final = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])


class Codec:
    """Encodes and decodes a closed set of attrs classes."""

    __slots__ = ("_decoders", "_encoder")

    def __init__(self, classes: Iterable[type]) -> None:
        self._encoder: Final = msgspec.msgpack.Encoder()
        self._decoders: Final[dict[str, msgspec.msgpack.Decoder[Any]]] = {
            cls.__name__: msgspec.msgpack.Decoder(cls) for cls in classes
        }

    def encode(self, message: object) -> bytes:
        """Encode an instance of one of the classes."""
        return self._encoder.encode((type(message).__name__, message))

    def decode(self, data: bytes | memoryview) -> Any:
        """Decode what `encode` made; a TransportError if the bytes are not a message of the set."""
        try:
            name, body = _ENVELOPE.decode(data)
            return self._decoders[name].decode(body)
        except KeyError as error:
            known = ", ".join(sorted(self._decoders))
            raise TransportError(f"message {error.args[0]!r} is not one of {known}") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise TransportError(f"malformed message of {len(data)} bytes: {error}") from error
