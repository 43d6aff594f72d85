from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import subprocess
import sys
from pathlib import Path

from transformers.utils import is_sklearn_available

from cosmos_core.run.plan import importing
from cosmos_core.testing.worlds import run_world

UNNEEDED = ("sklearn", "boto3", "scipy.optimize")


IMPORTED = f"""
import importlib.util, sys
import cosmos_core.models
assert "transformers" in sys.modules
for name in {UNNEEDED}:
    assert name not in sys.modules, name
    assert importlib.util.find_spec(name) is not None, name
"""


def _used():
    from transformers.loss.loss_for_object_detection import linear_sum_assignment
    from transformers.models import bert, qwen3
    from transformers.utils.import_utils import create_import_structure_from_path as read

    # The folder of all models was read, and not again as the file in it.
    package, misses = Path(importlib.util.find_spec("transformers.models").origin), read.cache_info().misses
    misses = [read(path) and read.cache_info().misses - misses for path in (package.parent, str(package))]
    names = sorted(each.__name__ for each in (bert.BertModel, qwen3.Qwen3ForCausalLM))
    return names, linear_sum_assignment([[2, 1], [1, 2]])[1].tolist(), [misses[0] == 0, misses[1] > 0]


def _logged():
    logger, told = logging.getLogger("transformers.models.mamba"), []

    def warn():
        with contextlib.redirect_stderr(io.StringIO()) as raw:
            logger.warning("slow kernel")
        told.append(raw.getvalue())

    warn()
    log = logging.StreamHandler(io.StringIO())
    logging.getLogger().addHandler(log)
    warn()
    logging.getLogger().removeHandler(log)
    with importing():
        pass
    warn()
    return told, log.stream.getvalue()


def test_warnings_of_transformers_go_into_the_log_if_there_is_one_and_are_no_part_of_a_plan():
    assert run_world(1, _logged) == [(["slow kernel\n", "", ""], "slow kernel\n")]


def test_models_are_imported_without_what_they_do_not_need():
    # MLflow's full package brings them along, and they can still be imported by whoever wants them. In a process of its
    # own: plugins that others preload import some of it.
    done = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_transformers_does_without():
    assert run_world(1, is_sklearn_available) == [False]


def test_what_is_imported_later_works():
    assert run_world(1, _used) == [(["BertModel", "Qwen3ForCausalLM"], [1, 0], [True, True])]
