"""transformers, imported without what no model needs: half of the time that a process of a run takes to start.

Import this module before any of transformers' models. It keeps four things from happening:

- scikit-learn, which MLflow brings along, draws SciPy and pandas in, for one function of assisted generation.
- boto3, the client of Amazon's services, is imported for a question that a command of accelerate's asks.
- SciPy's optimisers are imported for one function of a loss of object detection, which still finds them when it runs.
- The folders of all models are read twice, by their package and by the package above it.

What transformers logs goes where all else goes that the process logs.
"""

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final

_UNNEEDED: Final = ("sklearn", "boto3")
_LATER: Final = "scipy.optimize"


@contextmanager
def _in_the_place_of(modules: Mapping[str, ModuleType | None]) -> Iterator[None]:
    """Let imports find other modules, or none; of those that are imported already nothing changes."""
    placed = {name: module for name, module in modules.items() if name not in sys.modules}
    sys.modules.update(placed)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in placed:
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
    with _in_the_place_of({**dict.fromkeys(_UNNEEDED), _LATER: assigning}):
        importlib.import_module("transformers.generation.candidate_generator")
        importlib.import_module("transformers.loss.loss_utils")


_import()
