"""How the processes of a run find one another, are watched, and are started."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
from attrs import validators as check

from cosmos_core.config.schema.fields import ABOVE_ZERO, NOT_NEGATIVE, POSITIVE, option
from cosmos_core.types import JSON


@attrs.frozen(kw_only=True)
class ControlConfig:
    """The controller."""

    bind: str = option("127.0.0.1", help="Address that the controller and the replicas' payload servers listen on.")
    port: int = option(
        0, help="Port of the controller; 0 takes a free one.", validator=check.and_(check.ge(0), check.le(65535))
    )
    keys: str | None = option(
        None,
        help="Folder of keys (`cosmos keys new`), needed to listen beyond this machine; the run's own if absent.",
    )
    page_port: int = option(
        0,
        help="Port of the live web page; 0 takes a free one, -1 serves none.",
        validator=check.and_(check.ge(-1), check.le(65535)),
    )
    page_bind: str = option(
        "127.0.0.1",
        help="Address that the page listens on; beyond this machine even looking needs the run's token.",
    )
    join_timeout_s: float = option(
        120.0, help="Seconds within which the replicas of the recipe must have joined.", validator=ABOVE_ZERO
    )
    heartbeat_s: float = option(1.0, help="Seconds between heartbeats.", validator=ABOVE_ZERO)
    lost_after_s: float = option(15.0, help="Seconds of silence after which a replica is lost.", validator=ABOVE_ZERO)
    progress_timeout_s: float = option(
        300.0,
        help="Seconds after which a replica that has work and makes no progress is given up, though it beats.",
        validator=ABOVE_ZERO,
    )
    durable: bool = option(False, help="Whether a journal commit survives a power cut (slower), not only a crash.")


@attrs.frozen(kw_only=True)
class LaunchConfig:
    """How processes are started."""

    launcher: str = option(
        "local", help="Name of a launcher plugin; `local` starts every process on the machine of `cosmos run`."
    )
    threads: int = option(1, help="OpenMP threads of each process on a CPU.", validator=POSITIVE)
    options: Mapping[str, JSON] = option(factory=dict, help="The launcher's own options.")
    restarts: int = option(
        3,
        help="Times in ten minutes that a replica, or the controller, is started again after it was killed; 0: never.",
        validator=NOT_NEGATIVE,
    )
