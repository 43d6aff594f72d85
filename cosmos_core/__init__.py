"""cosmos-core: asynchronous post-training of language, vision-language and world models.

`train`, `plan` and `open` are runs from Python (`cosmos_core.api`). Importing this package imports neither torch nor
any plugin; each process imports what its role needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from cosmos_core.api.run import open_run as open  # noqa: A004 - as `gzip.open`, it is said with the package's name
    from cosmos_core.api.start import plan, train

__all__ = ["__version__", "open", "plan", "train"]
__version__: Final = "0.1.0"
_LATER: Final = {"train": ("start", "train"), "plan": ("start", "plan"), "open": ("run", "open_run")}


def __getattr__(name: str) -> Any:
    """Import what is asked for: a process of a run asks for none of it."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _LATER[name]
    return getattr(import_module(f"cosmos_core.api.{module}"), attribute)
