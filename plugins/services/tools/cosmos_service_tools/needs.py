"""Checks of what one recipe needs: its plugins, its ports, its keys."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from cosmos_core.config.checks import is_loopback
from cosmos_core.config.schema import Recipe
from cosmos_core.devices import visible_gpus
from cosmos_core.errors import ConfigError
from cosmos_core.plugins.discovery import discover
from cosmos_core.transport.key_folder import check_folder
from cosmos_service_tools.findings import Check, Finding, ok, problem
from cosmos_service_tools.missing import missing_from


def checks(recipe: Recipe, folder: Path) -> dict[str, Check]:
    """The checks by name; `folder` is that of the recipe's file."""
    return {
        "recipe": partial(plugins, recipe),
        "its ports": partial(ports, recipe),
        "its keys": partial(keys, recipe, folder),
        "its devices": partial(devices, recipe),
    }


def plugins(recipe: Recipe) -> Iterator[Finding]:
    """Name what is missing, and one line that installs it."""
    missing = missing_from(recipe, discover())
    if missing.distributions:
        yield problem(
            "recipe", f"plugins that it names are not installed: {', '.join(missing.distributions)}", missing.install
        )
    for text in missing.unknown:
        yield problem("recipe", text, "")
    if not missing.words:
        yield ok("recipe", f"{recipe.run.name}: every plugin that it names is installed")


def ports(recipe: Recipe) -> Iterator[Finding]:
    """Listen for a moment at the ports that the recipe fixes; a launcher's machines are not looked at."""
    if recipe.launch.launcher != "local":
        return
    control = recipe.control
    for key, address, port in (
        ("control.port", control.bind, control.port),
        ("control.page_port", control.page_bind, control.page_port),
    ):
        if (port == 0 and is_loopback(address)) or port < 0:
            continue
        remedy = f"end what listens there (ss -ltnp), or --set {key}=0, which takes a free one"
        bind = key.replace("port", "bind")
        try:
            family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family) as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(place)
                listener.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                yield problem("its ports", f"{key}: {port} of {address} is taken", remedy)
            elif error.errno == errno.EACCES:
                yield problem(
                    "its ports", f"{key}: {port} is for root alone", f"choose one from 1024 on: --set {key}=8077"
                )
            else:
                text = f"{bind}: {address} cannot be listened at: {error.strerror}"
                yield problem("its ports", text, "name an address of this machine, or 0.0.0.0 for all")
        else:
            yield ok("its ports", f"{key}: {port} of {address} is free")


def keys(recipe: Recipe, folder: Path) -> Iterator[Finding]:
    """Look at the folder of keys that the recipe names, or that it needs."""
    control = recipe.control
    if control.keys is not None:
        try:
            check_folder(folder / Path(control.keys).expanduser())
        except ConfigError as error:
            yield problem("its keys", f"control.keys: {error}", "")
        else:
            yield ok("its keys", f"control.keys: {control.keys} can be used")
    elif recipe.launch.launcher == "local" and not is_loopback(control.bind):
        text = f"control.bind: other machines can reach {control.bind}, and control.keys names no keys"
        yield problem("its keys", text, "cosmos keys new keys, then control.keys")


def devices(recipe: Recipe) -> Iterator[Finding]:
    """Look for the GPUs that the recipe insists on."""
    wanted = [f"{pool}.device" for pool in ("policy", "rollout") if getattr(recipe, pool).device == "cuda"]
    if wanted and recipe.launch.launcher == "local" and not visible_gpus():
        hidden = " (CUDA_VISIBLE_DEVICES is set)" if "CUDA_VISIBLE_DEVICES" in os.environ else ""
        yield problem(
            "its devices", f'{" and ".join(wanted)}: "cuda", and this machine shows no GPU{hidden}', 'set "auto"'
        )
