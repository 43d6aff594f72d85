"""`cosmos keys`: makes the keys of a run that listens beyond this machine, and allows or revokes them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="A folder of keys, or a run's folder.")]
Label = Annotated[str, typer.Argument(metavar="NAME", help="Name of a key, as in the allow-list.")]


@app.callback()
def _root() -> None:
    """Make keys, and say who may speak in a run.

    \b
    Keys for runs on several hosts; then put `control.keys = "keys"` into the recipe, and on each host only its files:
      cosmos keys new keys
      cosmos keys revoke keys rollout
    """  # noqa: D301 - the escape keeps the lines after it apart


@app.command()
def new(
    folder: Folder,
    *,
    policy: Annotated[
        list[str] | None, typer.Option("--policy", metavar="NAME", help="Policy replicas; may end in `*`.")
    ] = None,
    rollout: Annotated[
        list[str] | None, typer.Option("--rollout", metavar="NAME", help="Rollout replicas; may end in `*`.")
    ] = None,
    person: Annotated[
        list[str] | None, typer.Option("--person", metavar="NAME", help="Someone who may watch, stop, drain and set.")
    ] = None,
    observer: Annotated[
        list[str] | None, typer.Option("--observer", metavar="NAME", help="Someone who may only watch.")
    ] = None,
) -> None:
    """Make keys and allow them: for each pool and for you, or those that you name.

    A key file is secret (mode 0600); its holder needs that file alone, and whoever serves others the list
    `allowed.toml`, too. A name that ends in `*` stands for all names that begin so.

    \b
    Examples:
      cosmos keys new keys
      cosmos keys new keys --rollout 'gpu7-*' --person ann
      cosmos keys new runs/arithmetic --observer wall-display
    """  # noqa: D301 - the escape keeps the lines after it apart
    from cosmos_core.transport.key_folder import USUAL, Wanted, make  # noqa: PLC0415
    from cosmos_service_tools.allow_list import role_of  # noqa: PLC0415

    given = {"policy": policy, "rollout": rollout, "person": person, "observer": observer}
    named = [Wanted(role=role_of(role), name=name) for role, names in given.items() for name in names or ()]
    keys = _folder(folder)
    for path in make(keys, named or USUAL):
        typer.echo(f"Made {path}")
    if keys == folder:
        typer.echo(f'Runs use them with --set control.keys="{keys.absolute()}".')


@app.command("list")
def show(folder: Folder) -> None:
    """Show who may speak: name, role, the names of replicas it may have, and the public key.

    \b
    Example:
      cosmos keys list keys
    """  # noqa: D301 - the escape keeps the lines after it apart
    from cosmos_core.transport.key_folder import read_peers  # noqa: PLC0415
    from cosmos_core.transport.keys import ALLOWED  # noqa: PLC0415

    for label, peer in sorted(read_peers(_folder(folder) / ALLOWED).items()):
        typer.echo(f"{label:<20} {peer.role:<9} {','.join(peer.names) or '-':<20} {peer.public}")


@app.command()
def allow(
    folder: Folder,
    name: Label,
    *,
    public: Annotated[
        str | None, typer.Option("--public", metavar="KEY", help="A public key made elsewhere; the folder's if absent.")
    ] = None,
    role: Annotated[
        str, typer.Option("--role", metavar="ROLE", help="With --public: policy, rollout, person or observer.")
    ] = "observer",
    names: Annotated[
        list[str] | None, typer.Option("--as", metavar="REPLICA", help="With --public: what a replica may be called.")
    ] = None,
) -> None:
    """Let a key in: one that was revoked, or one that was made elsewhere. Runs that go on take it up at once.

    \b
    Examples:
      cosmos keys allow keys rollout
      cosmos keys allow keys bob --role person --public 'rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7'
    """  # noqa: D301 - the escape keeps the lines after it apart
    from cosmos_service_tools.allow_list import allow, allow_again, role_of  # noqa: PLC0415

    keys = _folder(folder)
    if public is None:
        allow_again(keys, name)
    else:
        allow(keys, name, public=public, role=role_of(role), names=tuple(names or ()))
    typer.echo(f"{name} may speak.")


@app.command()
def revoke(folder: Folder, name: Label) -> None:
    """Shut a key out: runs that go on refuse it within a second, and lose the replicas that speak with it.

    Such a replica is not started again. The run goes on with those that are left; if none of its role is, it waits
    control.join_timeout_s for one that joins with another key, or with this one once it is allowed again.

    \b
    Example:
      cosmos keys revoke runs/arithmetic rollout
    """  # noqa: D301 - the escape keeps the lines after it apart
    from cosmos_service_tools.allow_list import revoke  # noqa: PLC0415

    revoke(_folder(folder), name)
    typer.echo(
        f"{name} may not speak any more: runs lose the replicas that do, which are not started again. Its file is "
        "still there: remove it where it lies."
    )


def _folder(folder: Path) -> Path:
    """The folder of keys: of a run, its own."""
    if not (folder / "job.json").is_file():
        return folder
    from cosmos_core.config.loading import load_job  # noqa: PLC0415

    return load_job(folder).keys
