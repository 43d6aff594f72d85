"""Runs confined programs for another process: `python -m cosmos_reward_code`, a request and an answer a line, as JSON.

A request has `program`, `input`, `name` and the limits of `sandbox.Limits`; an answer has what `sandbox.Ran` has, or
`error`, which says why nothing was run. This process ends with the one that started it, and its program with it.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import attrs

from cosmos_core.errors import CosmosError
from cosmos_reward_code import sandbox
from cosmos_reward_code.confinement import kernel


def answer(line: str) -> dict[str, Any]:
    """The answer to a request."""
    try:
        asked = json.loads(line)
        limits = sandbox.Limits(**asked["limits"])
        ran = sandbox.run(str(asked["program"]), str(asked.get("input", "")), limits, name=str(asked["name"]))
    except CosmosError as error:
        return {"error": str(error)}
    except (ValueError, TypeError, KeyError) as error:
        words = "program, name, input and limits (time_s, cpu_s, memory_bytes, output_bytes)"
        return {"error": f"a request is a JSON object of {words}, and {line!r:.200} is none ({error!r:.200})"}
    return attrs.asdict(ran)


def main() -> None:
    """Answer until standard input is closed."""
    kernel.die_with(os.getppid())
    for line in sys.stdin:
        sys.stdout.write(f"{json.dumps(answer(line))}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
