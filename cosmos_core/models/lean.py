"""transformers, imported without what no model needs: half of the time that a process of a run takes to start.

Import this module before any of transformers' models. It keeps three things from happening:

- scikit-learn, which MLflow brings along, draws SciPy and pandas in, for one function of assisted generation.
- SciPy's optimisers are imported for one function of a loss of object detection, which still finds them when it runs.
- The folders of all models are read twice, by their package and by the package above it.

What transformers logs goes where all else goes that the process logs.
"""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final

_UNNEEDED: Final = "sklearn"
_LATER: Final = "scipy.optimize"


@contextmanager
def _in_the_place_of(name: str, module: ModuleType | None) -> Iterator[None]:
    """Let imports find another module, or none; of one that is imported already nothing changes."""
    is_there = name in sys.modules
    if not is_there:
        sys.modules[name] = module  # type: ignore[assignment]
    try:
        yield
    finally:
        if not is_there:
            del sys.modules[name]


def _assign(*arguments: Any, **options: Any) -> Any:
    """Call `scipy.optimize.linear_sum_assignment`."""
    return importlib.import_module(_LATER).linear_sum_assignment(*arguments, **options)


@contextmanager
def _folders_read_once() -> Iterator[None]:
    """Let the package of all models find what the package above it has read of the same folder."""
    from transformers.utils import import_utils  # noqa: PLC0415 - the first import of transformers

    read = import_utils.create_import_structure_from_path
    import_utils.create_import_structure_from_path = lambda path: read(
        Path(path).parent if Path(path).is_file() else path
    )
    try:
        yield
    finally:
        import_utils.create_import_structure_from_path = read


def _import() -> None:
    assigning = ModuleType(_LATER)
    assigning.linear_sum_assignment = _assign  # type: ignore[attr-defined]
    with _folders_read_once():
        importlib.import_module("transformers.models")
    logging = importlib.import_module("transformers.utils.logging")
    logging.disable_default_handler()
    logging.enable_propagation()
    with _in_the_place_of(_UNNEEDED, None), _in_the_place_of(_LATER, assigning):
        importlib.import_module("transformers.generation.candidate_generator")
        importlib.import_module("transformers.loss.loss_utils")


_import()
