from __future__ import annotations

import importlib.util
import sys

from transformers.utils import is_sklearn_available

from cosmos_core.testing.worlds import run_world


def _imported():
    return "transformers" in sys.modules, "sklearn" in sys.modules, importlib.util.find_spec("sklearn") is not None


def test_models_are_imported_without_what_they_do_not_need():
    # MLflow's full package brings it along, and it can still be imported by whoever wants it.
    assert run_world(1, _imported) == [(True, False, True)]


def test_transformers_does_without():
    assert run_world(1, is_sklearn_available) == [False]
