"""Options that several of the commands have."""

from __future__ import annotations

from typing import Annotated

import typer

from cosmos_core.protocols.versions import Kind

KindOption = Annotated[Kind | None, typer.Option("--kind", help="Only plugins of this kind.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
