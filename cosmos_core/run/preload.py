"""Imported first by the fork server, this lets it look for no garbage, and import the rest after its first fork.

Nothing that imports make is garbage, and looking for some takes a fifth of their time. A fork does it again. The first
fork plans the run; what only the controller and the replicas need is imported beside it.
"""

import contextlib
import gc
import os
from importlib import import_module
from typing import Final

_LATER: Final = [
    "cosmos_core.control.__main__",
    "cosmos_core.control.page.service",
    "cosmos_core.rollout.__main__",
    "cosmos_core.rollout.embedded.engine",
    "cosmos_core.policy.__main__",
]
_SERVER: Final = os.getpid()


def _import_later() -> None:
    # Forks may fork, too.
    while os.getpid() == _SERVER and _LATER:
        # A process that needs it tells what is wrong with it.
        with contextlib.suppress(ImportError):
            import_module(_LATER.pop(0))


gc.disable()
os.register_at_fork(after_in_parent=_import_later)
