"""`cosmos reward-service` as a process, and requests for it."""

import contextlib
import io
import json
import os
import re
import signal
import urllib.error
import urllib.request
from pathlib import Path

import attrs
import numpy as np
import pytest

from tests.commandline import CommandLine

TOKEN = "t0ken-very-secret"
CRASH, HANG, RAISE = 1, 2, 3
MODULE = """
from cosmos_core.protocols import hookimpl
from reward_plugins import {make}, provide

@hookimpl
def cosmos_reward():
    return provide({make}, {kinds})
"""
CONFIG = """
port = 0
queue = 100
batch = 4
body_mb = 1
keep_s = 2.0
forget_s = 3.0
drain_s = 20.0
upload_s = 10.0

[[scorer]]
plugin = "sees"

[[scorer]]
plugin = "moody"
timeout_s = 2.0
workers = 2
"""


@attrs.define
class Serving:
    """A service that serves."""

    process: object
    url: str
    folder: Path
    output: str = ""
    """All that it printed, once it has ended."""

    def ask(self, method, path, data=None, *, token=TOKEN, **headers):
        """Status, headers and JSON (or text) of an answer."""
        headers = {
            "Authorization": f"Bearer {token}",
            **{name.replace("_", "-"): each for name, each in headers.items()},
        }
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                status, said, found = answer.status, answer.read(), answer.headers
        except urllib.error.HTTPError as error:
            with error:
                status, said, found = error.code, error.read(), error.headers
        return status, json.loads(said) if found.get_content_type() == "application/json" else said.decode(), found

    def enqueue(self, data, **headers):
        return self.ask("POST", "/v1/enqueue", data, **headers)

    def fetch(self, ticket, wait_s=0):
        return self.ask("GET", f"/v1/fetch?id={ticket}&wait_s={wait_s}")[:2]

    def metric(self, name):
        text = self.ask("GET", "/metrics")[1]
        return float(re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)[1])


def body(*firsts, scorers=("sees",), **line):
    """A body of one small video for each number, which its bytes are."""
    frames = np.array([np.full((2, 4, 4, 3), first, np.uint8) for first in firsts])
    made = {"version": 1, "kind": "media", "scorers": scorers}
    made["completions"] = [{"prompt": f"p{index}", "fps": 8.0} for index in range(len(firsts))]
    file = io.BytesIO()
    np.save(file, frames)
    return json.dumps({**made, **line}).encode() + b"\n" + file.getvalue()


@contextlib.contextmanager
def serving(folder, config=CONFIG):
    """The command, in a folder, with the plugins that its scorers are."""
    for name, make, kinds in (("sees", "Sees", '"media", "latents"'), ("moody", "Moody", '"media"')):
        info = folder / f"{name}-1.0.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: cosmos-core>=0.1\n"
        )
        (info / "entry_points.txt").write_text(f"[cosmos_core.rewards]\n{name} = reward_{name}\n")
        (info / "RECORD").write_text("")
        (folder / f"reward_{name}.py").write_text(MODULE.format(make=make, kinds=kinds))
    (folder / "rewards.toml").write_text(config)
    with pytest.MonkeyPatch.context() as patch:
        places = [str(folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, places)))
        patch.setenv("WFM_REWARD_TOKEN", TOKEN)
        patch.setenv("NO_LOADING", str(folder / "no-loading"))
        command = CommandLine(folder)
        process = command.start("reward-service", "--config", "rewards.toml")
        line = process.stdout.readline()
        url = re.match(r"Reward service at (http://127\.0\.0\.1:\d+): ", line)
        assert url, line + (process.communicate(timeout=30)[0] or "")
        assert process.stdout.readline() == (
            f"Runs find it by WFM_REWARD_ENQUEUE_URL={url[1]}/v1/enqueue WFM_REWARD_FETCH_URL={url[1]}/v1/fetch\n"
        )
        try:
            yield (found := Serving(process, url[1], folder))
        finally:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            found.output = process.communicate(timeout=30)[0]
            assert TOKEN not in found.output
            assert not command.left_behind()
