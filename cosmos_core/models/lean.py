"""transformers, imported without what no model needs: half of the time that a process of a run takes to start.

Import this module before any of transformers' models. It keeps three things from happening:

- scikit-learn, which MLflow brings along, draws SciPy and pandas in, for one function of assisted generation.
- SciPy's optimisers are imported for one function of a loss of object detection, which still finds them when it runs.
- The folders of all models are read twice, by their package and by the package above it.

What transformers logs goes into the log of the process, as all else does, and not to the terminal beside it.
"""

import importlib
import logging
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


def _read_folders_once() -> None:
    from transformers.utils import import_utils  # noqa: PLC0415 - the first import of transformers

    read = import_utils.create_import_structure_from_path
    import_utils.create_import_structure_from_path = lambda path: read(
        Path(path).parent if Path(path).is_file() else path
    )


def _log_as_others() -> None:
    from transformers.utils import logging as theirs  # noqa: PLC0415 - the first import of transformers

    theirs.disable_default_handler()
    theirs.enable_propagation()
    # A process without a log, such as `cosmos plan`, would print it raw.
    logging.getLogger("transformers").addHandler(logging.NullHandler())


def _import() -> None:
    assigning = ModuleType(_LATER)
    assigning.linear_sum_assignment = _assign  # type: ignore[attr-defined]
    _read_folders_once()
    _log_as_others()
    with _in_the_place_of(_UNNEEDED, None), _in_the_place_of(_LATER, assigning):
        importlib.import_module("transformers.generation.candidate_generator")
        importlib.import_module("transformers.loss.loss_utils")


_import()
