"""The command `cosmos compare`: runs side by side, as a table and as a page of overlaid curves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, going on or ended.")],
    *,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", metavar="FILE.html", help="The page; comparison.html in the first run's folder if absent."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, for programs; a page is made with --output alone.")
    ] = False,
) -> None:
    """Compare runs: outcomes, figures, and the keys in which their recipes differ; and overlay their curves on a page.

    The page is one file that fetches nothing: values under the pointer, and zoom by dragging, in all curves together.

    \b
    Examples:
      cosmos compare runs/arithmetic runs/arithmetic-hot
      cosmos compare runs/* --output sweep.html
      cosmos compare runs/one runs/two --json
    """  # noqa: D301 - the escape keeps the lines after it apart
    from cosmos_service_tools.comparison import as_plain, load, show  # noqa: PLC0415
    from cosmos_service_tools.comparison_page import check_page, write_page  # noqa: PLC0415

    if output is not None:
        check_page(output)
    found = load(runs)
    page = output or (None if as_json else runs[0] / "comparison.html")
    if as_json:
        typer.echo(as_plain(found))
    else:
        show(found)
    if page is not None:
        write_page(found, page, is_chosen=output is not None)
        typer.echo(f"Curves: {page}", err=as_json)
