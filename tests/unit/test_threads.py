import asyncio
import threading
from concurrent.futures import wait

import pytest

from cosmos_core.threads import begin


def test_what_a_call_returns_or_raises_is_the_future_s():
    assert begin(lambda: threading.current_thread().name, "named").result(5) == "named"
    for error in (ValueError("no"), SystemExit(3)):

        def fail(error=error):
            raise error

        with pytest.raises(type(error)) as raised:
            begin(fail, "fails").result(5)
        assert raised.value is error


def test_a_call_that_hangs_is_left_behind_and_may_end_later():
    release = threading.Event()
    hung = begin(lambda: release.wait(30), "hangs")
    (thread,) = [each for each in threading.enumerate() if each.name == "hangs"]
    assert thread.daemon
    assert wait([hung], 0.05).not_done

    async def give_up():
        async with asyncio.timeout(0.05):
            await asyncio.wrap_future(hung)

    with pytest.raises(TimeoutError):
        asyncio.run(give_up())
    release.set()
    assert hung.result(5) is True
