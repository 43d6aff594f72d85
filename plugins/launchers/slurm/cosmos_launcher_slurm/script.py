"""The batch script of a run: components as #SBATCH lines, then the supervisor, watched for the signals of the cluster.

The script runs on the first node of component 0. It resumes the run's folder, whether the run has not begun, was
stopped before its time limit, or was taken off its nodes: so a requeued job goes on by itself.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from cosmos_core.errors import ConfigError
from cosmos_core.protocols import LauncherContext
from cosmos_launcher_slurm.components import Component
from cosmos_launcher_slurm.options import SlurmOptions

_HEADER: Final = "#!/bin/bash"
_NOTE: Final = "# Submitted by `cosmos launch`, which makes the run's folder first; by itself it is for reading."
_STOPPED: Final = (130, 143)
"""Exit codes of a run that was stopped: by its supervisor, or before it could listen to signals."""

_WATCH: Final = """\
# A signal interrupts `wait`; only the second one then has the run's exit code.
interrupted= warned= run=
stop() {{ interrupted=1; [ -z "$run" ] || kill -TERM "$run" 2>/dev/null; }}
trap 'warned=1; stop' USR1
trap stop TERM
{command} &
# What came before its number was known is passed on now; no trap runs within a command.
run=$! early=$interrupted
[ -z "$early" ] || stop
while :; do
    wait "$run"
    code=$?
    [ -n "$interrupted" ] || break
    interrupted=
done
# Stopped by the time limit, not finished: the job waits in the queue again, and goes on from the checkpoint.
case "$warned:$code" in
{stopped}) scontrol requeue "$SLURM_JOB_ID" && sleep 60 ;;
esac
exit "$code"
"""


def script(context: LauncherContext, options: SlurmOptions, parts: Sequence[Component], here: Path) -> str:
    """The batch script.

    Args:
        context: The run.
        options: Of the cluster.
        parts: The job's components, the controller's first.
        here: Folder that the job starts in.

    Raises:
        ConfigError: A path has characters that would end a line of the script.
    """
    for path in (str(context.directory.absolute()), str(here)):
        if not path.isprintable():
            raise ConfigError(f"{path!r}: a batch script cannot have this path; choose another run.output_dir or name")
    directory = str(context.directory.absolute())
    supervisor = shlex.join([options.python, "-P", "-m", "cosmos_core.cli", "run", "--resume", directory])
    stopped = "|".join(f"1:{code}" for code in _STOPPED)
    lines = [
        _HEADER,
        _NOTE,
        *_directives(context, options, parts, here),
        "",
        *options.setup,
        # The controller of an earlier job is gone, and a process of this node may have its number.
        f"rm -f -- {shlex.quote(f'{directory}/controller.json')}",
        _WATCH.format(command=supervisor, stopped=stopped),
    ]
    return "\n".join(lines)


def job_name(run: str) -> str:
    """The name of a run's job in Slurm."""
    return f"cosmos-{run}"


def _directives(
    context: LauncherContext, options: SlurmOptions, parts: Sequence[Component], here: Path
) -> Iterator[str]:
    """The #SBATCH lines: what concerns the job as a whole belongs to its first component."""
    directory = str(context.directory.absolute()).replace("%", "%%")
    output = f"{directory}/logs/slurm-%j.log"
    first = {
        "job-name": job_name(context.name),
        "chdir": str(here),
        "output": output,
        "open-mode": "append",
        "signal": f"B:USR1@{options.stop_before_s}",
    }
    for name, value in first.items():
        yield _directive(name, value)
    yield "#SBATCH --requeue"
    for part in parts:
        if part.group:
            yield "#SBATCH hetjob"
        yield f"# {part.role}"
        yield from _component(part, options)


def _component(part: Component, options: SlurmOptions) -> Iterator[str]:
    shared = {
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "time": options.time,
        "mem-per-cpu": options.memory_per_cpu,
    }
    for name, value in shared.items():
        if value is not None:
            yield _directive(name, value)
    if part.nodes is None:
        yield _directive("ntasks", str(part.tasks))
    else:
        yield _directive("nodes", str(part.nodes))
        yield _directive("ntasks-per-node", str(part.tasks))
    yield _directive("cpus-per-task", str(part.cpus_per_task))
    if part.gpus_per_node:
        kind = f"{options.gpu_type}:" if options.gpu_type else ""
        yield _directive("gpus-per-node", f"{kind}{part.gpus_per_node}")
    for line in options.sbatch:
        yield f"#SBATCH {line}"


def _directive(name: str, value: str) -> str:
    # sbatch splits these lines at white space, and knows quotes.
    return f"#SBATCH --{name}={shlex.quote(value)}"
