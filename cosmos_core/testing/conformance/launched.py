"""`python -m cosmos_core.testing.conformance.launched FOLDER TASK`: a process for a launcher to start.

It writes `<name>.started` (its command line and what the kit set in its environment, as JSON) and then, by its task:
`exit:CODE` says something on its last line and ends; `stubborn` and `willing` go on, adding to `<name>.alive`, until
they are killed, or for `willing` asked to end, which it notes in `<name>.asked`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

VARIABLE: Final = "COSMOS_CONFORMANCE_LAUNCHED"
LAST_WORDS: Final = "the probe was told to end so"


def main(arguments: Sequence[str]) -> int:
    """Do the task; the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("task")
    parser.add_argument("--name", required=True)
    options, rest = parser.parse_known_args(arguments)
    path: Path = options.folder / options.name
    task, _, code = str(options.task).partition(":")

    def asked(*_: object) -> None:
        path.with_name(f"{path.name}.asked").touch()
        if task == "willing":
            sys.exit(0)

    signal.signal(signal.SIGTERM, asked)
    draft = path.with_name(f"{path.name}.partial")
    draft.write_text(json.dumps({"rest": rest, "variable": os.environ.get(VARIABLE, "")}), encoding="utf-8")
    draft.replace(path.with_name(f"{path.name}.started"))
    if task == "exit":
        print(LAST_WORDS, flush=True)  # noqa: T201 - what a launcher keeps
        return int(code)
    end = time.monotonic() + 60.0
    while time.monotonic() < end:
        with path.with_name(f"{path.name}.alive").open("a") as file:
            file.write(".")
        time.sleep(0.02)
    return 9


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
