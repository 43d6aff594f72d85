import os
import signal

import pytest

from cosmos_core.errors import ConfigError, CosmosError
from cosmos_core.run.command import in_fork

KNOWN = []


def test_a_call_in_a_fork_leaves_only_its_error(capfd):
    def refuse():
        KNOWN.append(1)
        raise ConfigError("model.path: no such folder")

    in_fork(lambda: KNOWN.append(1))
    with pytest.raises(ConfigError, match=r"^model\.path: no such folder$"):
        in_fork(refuse)
    assert KNOWN == []

    # What is no refusal shows its traceback; what was killed is told.
    with pytest.raises(SystemExit) as ended:
        in_fork(lambda: {}["absent"])
    assert ended.value.code == 1
    assert "KeyError: 'absent'" in capfd.readouterr().err
    with pytest.raises(CosmosError, match=r"planning was ended by signal 9; .* memory"):
        in_fork(lambda: os.kill(os.getpid(), signal.SIGKILL))
