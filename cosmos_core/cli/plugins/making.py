"""`cosmos plugins new`: a package to start from."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer


def new_plugin(
    kind: Annotated[str, typer.Argument(help="What it plugs in: model, algorithm, reward, dataset, engine or hook.")],
    name: Annotated[str, typer.Argument(help="What recipes will call it, such as brevity or short-answers.")],
    *,
    into: Annotated[
        Path, typer.Option("--into", metavar="DIR", help="Folder in which to make the package's.")
    ] = Path(),
    author: Annotated[str, typer.Option("--author", metavar="NAME", help="Who makes it, for its metadata.")] = "",
    description: Annotated[
        str, typer.Option("--description", metavar="TEXT", help="One line about it, for its metadata.")
    ] = "",
) -> None:
    """Write a complete package with a small working plugin: options, tests, an example recipe, CI that publishes it.

    \b
    Examples:
      cosmos plugins new reward brevity
      cosmos plugins new dataset chess-puzzles --into ~/plugins --author "Ann Lee"
    """  # noqa: D301 - the escape keeps the lines after it apart
    from cosmos_core.plugins.scaffold import new_package  # noqa: PLC0415  # keeps `cosmos --help` quick

    folder = new_package(kind, name, into=into.expanduser(), author=author, description=description)
    typer.echo(f"Made {folder}/. Next:\n")
    for command, purpose in (
        (f"cd {shlex.quote(str(folder))}", ""),
        ("pip install --editable . --group dev", "pip 25.1 or newer; from then on recipes may name it"),
        ("pytest", "the conformance kit, and its own tests"),
        ("cosmos run example.toml", "a few steps on this machine"),
        ("cosmos plugins check .", "whether it is fit to be published"),
    ):
        typer.echo(f"  {command:<40}{f'# {purpose}' if purpose else ''}".rstrip())
