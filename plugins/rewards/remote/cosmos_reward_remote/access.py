"""Address and credentials of a reward service: environment variables, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import attrs

from cosmos_core.errors import ConfigError
from cosmos_reward_remote.exchange import address, is_in_the_clear

PREFIXES: Final = ("WFM_REWARD", "REMOTE_REWARD")


@attrs.frozen(kw_only=True)
class Access:
    """A reward service.

    Attributes:
        enqueue_url: Where requests go.
        fetch_url: Where results are.
        token: What lets one in.
    """

    enqueue_url: str
    fetch_url: str
    token: str = attrs.field(repr=False)


def access(environment: Mapping[str, str], *, allow_http: bool) -> Access | None:
    """The service that an environment names; None if it names none.

    `WFM_REWARD_ENQUEUE_URL`, `WFM_REWARD_FETCH_URL` and `WFM_REWARD_TOKEN`; where neither address is set, those that
    begin with `REMOTE_REWARD` instead. A token is never sent to an address of the other name.

    Args:
        environment: Variables.
        allow_http: Whether the token may go to other machines unencrypted.

    Raises:
        ConfigError: An address is none, is not encrypted, or is without the other one or the token.
    """
    for prefix in PREFIXES:
        names = [f"{prefix}_{each}" for each in ("ENQUEUE_URL", "FETCH_URL", "TOKEN")]
        enqueue_url, fetch_url, token = (environment.get(name, "").strip() for name in names)
        if not enqueue_url and not fetch_url:
            continue
        missing = [name for name in names if not environment.get(name, "").strip()]
        if missing:
            known = [name for name in names if name not in missing]
            are, them = "are" if len(known) > 1 else "is", "them" if len(missing) > 1 else "it"
            raise ConfigError(
                f"{' and '.join(missing)}: not set, but {' and '.join(known)} {are}; a service is asked with all "
                f"three, so set {them} where this runs"
            )
        for name, url in zip(names, (enqueue_url, fetch_url), strict=False):
            if is_in_the_clear(address(name, url)) and not allow_http:
                raise ConfigError(
                    f"{name}: {url!r} would send the token in the clear; use https, or set allow_http = true if nobody "
                    "else is on that network"
                )
        return Access(enqueue_url=enqueue_url, fetch_url=fetch_url, token=token)
    return None
