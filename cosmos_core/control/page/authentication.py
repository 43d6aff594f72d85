"""Authentication of the page: a request's head alone decides whether it may look, or ask for something.

- `Host` must be a name of this server: a foreign name that was made to point here (DNS rebinding) is refused.
- `Origin` and `Sec-Fetch-Site` must be this page's own: other sites in the same browser are refused.
- What changes something needs the token, always; beyond loopback whatever tells of the run needs it, too.

The token comes in the `Authorization` header, which no other site can make a browser send: there are no cookies.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

import attrs

from cosmos_core.config.checks import is_loopback
from cosmos_core.errors import TransportError
from cosmos_core.files import replace_file

_READING: Final = ("GET", "HEAD")
_OWN_SITES: Final = ("same-origin", "none")
_SCHEME: Final = "bearer"


class Headers(Protocol):
    """A request's headers; names in any case."""

    def getall(self, key: str, default: Sequence[str]) -> Sequence[str]:
        """Every value of a header."""


@attrs.frozen(kw_only=True)
class Refusal:
    """The reason for which a request is not served, and its HTTP status."""

    status: int
    reason: str


@attrs.frozen(kw_only=True)
class PageAuthentication:
    """The rules by which one page serves a request or refuses it.

    Attributes:
        token: What proves that somebody may change something.
        names: Names of this machine, beside addresses and `localhost`.
    """

    token: str = attrs.field(repr=False)
    bind: str
    names: frozenset[str] = frozenset()

    @property
    def is_exposed(self) -> bool:
        """True if other machines can reach the page, so that even looking needs the token."""
        return not is_loopback(self.bind)

    def refusal(self, method: str, path: str, headers: Headers, *, is_data: bool) -> Refusal | None:
        """The refusal of a request; None if it may be served.

        `is_data` says whether the answer tells of the run; what does not is the same for every run.
        """
        hosts = headers.getall("Host", ())
        if len(hosts) != 1 or not self._is_own(hosts[0]):
            shown = ascii(", ".join(hosts))[:100]
            return Refusal(status=403, reason=f"Host {shown} is no name of this page; use its address or localhost")
        origins = headers.getall("Origin", ())
        if any(origin not in (f"http://{hosts[0]}", f"https://{hosts[0]}") for origin in origins):
            return Refusal(status=403, reason="the request comes from another origin")
        if not self._is_from_here(path, headers):
            return Refusal(status=403, reason="the request comes from another site")
        if (method not in _READING or (is_data and self.is_exposed)) and not self._has_token(headers):
            return Refusal(status=401, reason=f"this needs the run's token (Authorization: Bearer, {_WHERE})")
        return None

    def _is_own(self, host: str) -> bool:
        name = host_name(host)
        if name is None:
            return False
        if name in self.names or name == "localhost":
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        # An address cannot be rebound.
        return self.is_exposed or address.is_loopback

    def _is_from_here(self, path: str, headers: Headers) -> bool:
        sites = headers.getall("Sec-Fetch-Site", ())
        is_visit = path == "/" and headers.getall("Sec-Fetch-Dest", ()) == ["document"]
        return is_visit or all(site in _OWN_SITES for site in sites)

    def _has_token(self, headers: Headers) -> bool:
        given = headers.getall("Authorization", ())
        scheme, _, token = given[0].partition(" ") if len(given) == 1 else ("", "", "")
        is_right = secrets.compare_digest(token.strip().encode("utf-8", "replace"), self.token.encode())
        return scheme.lower() == _SCHEME and is_right


_WHERE: Final = "page.token in the run's folder"


def host_name(host: str) -> str | None:
    """The name or address of a `Host` header, in lower case and without its port; None if it is none."""
    if host.startswith("["):
        name, bracket, port = host[1:].partition("]")
        port = port.removeprefix(":") if port else "0"
        is_formed = bool(bracket) and ":" in name
    else:
        name, colon, port = host.partition(":")
        port = port if colon else "0"
        is_formed = bool(name)
    is_port = port.isascii() and port.isdigit() and len(port) <= 5
    return name.lower() if is_formed and is_port else None


NAME: Final = "page.token"
_BYTES: Final = 32
_FORM: Final = re.compile(r"[A-Za-z0-9_-]{43}")


def run_token(directory: Path) -> str:
    """The token of a run's folder; made where there is none yet, or where others could have read or chosen it."""
    path = directory / NAME
    try:
        if (known := _read(path)) is not None:
            return known
        token = secrets.token_urlsafe(_BYTES)
        replace_file(path, f"{token}\n".encode("ascii"), mode=0o600)
    except OSError as error:
        raise TransportError(f"{path}: the page's token cannot be kept: {error.strerror}") from error
    return token


def _read(path: Path) -> str | None:
    """The token in a file, if nobody else could read or write it."""
    with contextlib.suppress(FileNotFoundError, UnicodeDecodeError):
        found = path.lstat()
        is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
        token = path.read_text(encoding="ascii").strip() if is_ours else ""
        if _FORM.fullmatch(token):
            return token
    return None
