"""The codecs of the control plane: one for each direction, one for the reports inside `Reports`."""

from __future__ import annotations

from typing import Final, get_args

from cosmos_core.transport.codec import Codec
from cosmos_core.transport.messages import Down, Up
from cosmos_core.transport.reports import Report
from cosmos_core.transport.requests import Request

UP: Final = Codec(get_args(Up))
"""What replicas and observers send to the controller."""

DOWN: Final = Codec(get_args(Down))
"""What the controller sends."""

REPORT: Final = Codec(get_args(Report))
"""A single report, as it lies in `Reports.reports` and in the journal."""

REQUEST: Final = Codec(get_args(Request))
"""A person's request, as it lies in `Command.request` and in the journal."""
