"""Address and credentials of a reward service: environment variables, and nothing else."""

from __future__ import annotations

from collections.abc import Collection, Mapping
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


def variables(given: Collection[str]) -> tuple[str, str, str]:
    """The variables of addresses and token: those whose addresses are given, the first ones if there are none."""
    addressed = (each for each in PREFIXES if {f"{each}_ENQUEUE_URL", f"{each}_FETCH_URL"}.intersection(given))
    prefix = next(addressed, PREFIXES[0])
    return f"{prefix}_ENQUEUE_URL", f"{prefix}_FETCH_URL", f"{prefix}_TOKEN"


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
    given = {name: value.strip() for name, value in environment.items() if value.strip()}
    names = variables(given)
    enqueue_url, fetch_url, token = (given.get(name, "") for name in names)
    if not enqueue_url and not fetch_url:
        return None
    if missing := [name for name in names if name not in given]:
        known = [name for name in names if name in given]
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
