"""What people ask for at the page: JSON in, the same requests as `cosmos set`, `drain` and `stop` out."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from cosmos_core.errors import TransportError
from cosmos_core.transport.bounds import Word
from cosmos_core.transport.requests import Drain, Request, Set, Stop

MOST_BYTES: Final = 16_384
"""Of a request's body."""

_JUDGED: Final = frozenset({"rollout.sampling.temperature", "sync.max_staleness"})
"""Dynamic keys that algorithms are told of (`protocols.AlgorithmContext`), besides their own options."""

_Word = Annotated[Word, msgspec.Meta(min_length=1)]


class _Stop(msgspec.Struct, tag_field="do", tag="stop", forbid_unknown_fields=True, frozen=True):
    def request(self) -> Request:
        return Stop()


class _Drain(msgspec.Struct, tag_field="do", tag="drain", forbid_unknown_fields=True, frozen=True):
    name: _Word

    def request(self) -> Request:
        return Drain(name=self.name)


class _Set(msgspec.Struct, tag_field="do", tag="set", forbid_unknown_fields=True, frozen=True):
    overrides: Annotated[tuple[_Word, ...], msgspec.Meta(min_length=1, max_length=32)]

    def request(self) -> Request:
        return Set(overrides=self.overrides)


_DECODER: Final[msgspec.json.Decoder[_Stop | _Drain | _Set]] = msgspec.json.Decoder(_Stop | _Drain | _Set)


def request_from(body: bytes) -> Request:
    """The request that a body asks for.

    Args:
        body: JSON such as `{"do": "drain", "name": "rollout-1"}` or `{"do": "set", "overrides": ["KEY=VALUE"]}`.

    Raises:
        TransportError: It is none, or asks for values that only plugins, which the controller has not, can judge; the
            message says why, and what to do.
    """
    try:
        request = _DECODER.decode(body).request()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TransportError(f"not a request of a run: {error}") from error
    if isinstance(request, Set):
        _check_judged(request)
    return request


def _check_judged(request: Set) -> None:
    """Refuse what an algorithm could refuse later, on every policy replica: that would be the end of the run."""
    keys = [override.partition("=")[0].strip() for override in request.overrides]
    if judged := [key for key in keys if key in _JUDGED or ".options." in key]:
        raise TransportError(
            f"{', '.join(judged)}: only the run's algorithm can judge this, and the page cannot ask it; use "
            f"`cosmos set {' '.join(request.overrides)}`, which asks the plugins"
        )
