from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import sys

from transformers.utils import is_sklearn_available

from cosmos_core.testing.worlds import run_world

UNNEEDED = ("sklearn", "scipy.optimize")


def _imported():
    can_be = [importlib.util.find_spec(name) is not None for name in UNNEEDED]
    return "transformers" in sys.modules, [name in sys.modules for name in UNNEEDED], can_be


def _used():
    from transformers.loss.loss_for_object_detection import linear_sum_assignment
    from transformers.models import bert, qwen3
    from transformers.utils.import_utils import create_import_structure_from_path as read

    package = importlib.util.find_spec("transformers.models")
    names = sorted(each.__name__ for each in (bert.BertModel, qwen3.Qwen3ForCausalLM))
    return names, linear_sum_assignment([[2, 1], [1, 2]])[1].tolist(), len(read(package.origin)) > 100


def _logged():
    logger, raw, log = logging.getLogger("transformers.models.mamba"), io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(raw):
        logger.warning("slow kernel")
        logging.getLogger().addHandler(logging.StreamHandler(log))
        logger.warning("slow kernel")
    return raw.getvalue(), log.getvalue()


def test_warnings_of_transformers_go_into_the_log_and_never_to_the_terminal_beside_it():
    assert run_world(1, _logged) == [("", "slow kernel\n")]


def test_models_are_imported_without_what_they_do_not_need():
    # MLflow's full package brings them along, and they can still be imported by whoever wants them.
    assert run_world(1, _imported) == [(True, [False, False], [True, True])]


def test_transformers_does_without():
    assert run_world(1, is_sklearn_available) == [False]


def test_what_is_imported_later_works():
    assert run_world(1, _used) == [(["BertModel", "Qwen3ForCausalLM"], [1, 0], True)]
