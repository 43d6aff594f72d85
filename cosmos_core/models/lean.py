"""transformers, without a package that it imports wherever it is installed and that no model needs.

scikit-learn, which MLflow brings along, draws SciPy and pandas in, for one function of assisted generation: a fifth of
the time that a process of a run takes to start. Import this module before any of transformers' models.
"""

import importlib
import sys
from typing import Final

_UNNEEDED: Final = "sklearn"


def _import_generation() -> None:
    is_hidden = _UNNEEDED not in sys.modules
    if is_hidden:
        sys.modules[_UNNEEDED] = None  # type: ignore[assignment]
    try:
        importlib.import_module("transformers.generation.candidate_generator")
    finally:
        if is_hidden:
            del sys.modules[_UNNEEDED]


_import_generation()
