import os
import signal

import pytest

from cosmos_core.errors import ConfigError, CosmosError, PluginBrokenError
from cosmos_core.run.fork import in_fork

KNOWN = []


class LocatedError(PluginBrokenError):
    """As a plugin's own may be made."""

    def __init__(self, where, what):
        super().__init__(f"{where}: {what}")


def test_a_call_in_a_fork_leaves_only_its_error(capfd):
    def refuse():
        KNOWN.append(1)
        try:
            {}["vocab"]
        except KeyError as error:
            raise ConfigError("model.path: no such folder") from error

    def break_down():
        raise LocatedError("numbers.py:3", "no rows")

    in_fork(lambda: KNOWN.append(1))
    with pytest.raises(ConfigError, match=r"^model\.path: no such folder$") as refused:
        in_fork(refuse)
    assert KNOWN == []
    # Where it was raised, and by what, is told to whoever debugs.
    assert "KeyError: 'vocab'" in str(refused.value.__cause__)
    with pytest.raises(LocatedError, match=r"^numbers\.py:3: no rows$"):
        in_fork(break_down)

    # What is no refusal shows its traceback; what was killed is told.
    with pytest.raises(SystemExit) as ended:
        in_fork(lambda: {}["absent"])
    assert ended.value.code == 1
    assert "KeyError: 'absent'" in capfd.readouterr().err
    with pytest.raises(CosmosError, match=r"planning was ended by signal 9; .* memory"):
        in_fork(lambda: os.kill(os.getpid(), signal.SIGKILL))

    # Ctrl-C reaches all of a terminal: whoever waits answers it.
    in_fork(lambda: os.kill(os.getpid(), signal.SIGINT))
    assert capfd.readouterr().err == ""
