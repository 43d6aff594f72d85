"""Exports a checkpoint as a folder in the model family's public format (Hugging Face safetensors)."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import attrs
import torch

from cosmos_core.config.job import Job
from cosmos_core.config.loading import load_job, run_of
from cosmos_core.config.problems import suggestion
from cosmos_core.config.schema import PolicyConfig
from cosmos_core.control.journal import replay
from cosmos_core.control.machine.progress import best_checkpoint
from cosmos_core.control.machine.state import State
from cosmos_core.devices import num_threads
from cosmos_core.errors import CheckpointError, ConfigError, JournalError
from cosmos_core.models.parallel.lora import trained_tensors
from cosmos_core.plugins.recipe import load_model
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.policy.checkpoints.checkpoint import completed, path_of, read_place
from cosmos_core.policy.checkpoints.frozen_digest import DRAWN, check_below, frozen_digest
from cosmos_core.policy.checkpoints.reader import load_shares
from cosmos_core.policy.mesh.layout import layout_of
from cosmos_core.policy.processes.world import single_world
from cosmos_core.policy.training.average import AVERAGE, averaged_tensors
from cosmos_core.protocols import Layout
from cosmos_core.run.folder import is_held
from cosmos_core.storage import MARKS, check_place, file_system, is_url, move_folder, send_folder, told
from cosmos_core.weights.shards import dtype_name, local_shard, torch_dtype

_LOG: Final = logging.getLogger(__name__)


TRAINED: Final = "float32"
"""The dtype in which weights are trained, and kept in checkpoints."""
_PLAIN: Final = "The model learned from plain prompts, which only its run tells: give cosmos chat and serve --plain"
_DTYPES: Final = (TRAINED, "bfloat16", "float16")


@attrs.frozen(kw_only=True)
class Exported:
    """An export.

    Attributes:
        step: Of the checkpoint.
        place: The path or URL of its folder.
        dtypes: The floating-point dtypes of its weights, that of most values first.
        note: About its use that the folder itself does not tell; empty if there is none.
    """

    step: int
    place: Path | str
    dtypes: Sequence[str]
    note: str = ""


def export_run(
    run: Path, *, step: str, output: Path | str | None, average: bool | None = None, dtype: str | None = None
) -> Exported:
    """Export a checkpoint of a run.

    Args:
        run: The run's folder.
        step: A number, `best` (by held-out accuracy, or reward of what is denoised, or loss) or `latest`.
        output: Where to, a path or the URL of a folder in a store, such as `s3://bucket/model`; `export` in the run's
            folder if None. An export that is there is replaced, and files of others stay. What is cut off is no
            export: see `send_folder`.
        average: Whether the average of the weights (`policy.average`) is exported; None: as the recipe says.
        dtype: Of the weights; None: that of the checkpoint which the run began with (see `protocols.Model.export`).

    Raises:
        ConfigError: `step`, `output` or `dtype` is unusable.
        CheckpointError: There is no such checkpoint, it is damaged, or it has values beyond the dtype.
        StorageError: There is something else at `output`, or it cannot be written.
    """
    if dtype is not None and dtype not in _DTYPES:
        raise ConfigError(f"--dtype: {dtype!r} is no dtype of exports; {suggestion(dtype, _DTYPES)}")
    job = load_job(run)
    chosen = choose_step(job, step)
    is_average = _is_average(job.recipe.policy, average)
    url = output if isinstance(output, str) and is_url(output) else None
    target = job.directory / "export-to-store" if url is not None else Path(output or run / "export")
    if url is None:
        check_place(target)
    else:
        # A store that does not answer is refused before minutes are spent on the model.
        with told(url):
            store, root = file_system(url)
            store.exists(f"{root.rstrip('/')}/{MARKS[0]}")
    with _made(job, chosen, target, is_average=is_average, dtype=dtype) as (partial, dtypes):
        has_template = (partial / "chat_template.jinja").exists()
        if url is None:
            move_folder(partial, target)
        else:
            send_folder(partial, url)
    is_apart = url is not None or run_of(target) is None
    note = _PLAIN if job.is_plain and has_template and is_apart else ""
    return Exported(step=chosen, place=url or target, dtypes=dtypes, note=note)


@contextmanager
def _made(
    job: Job, step: int, target: Path, *, is_average: bool, dtype: str | None
) -> Iterator[tuple[Path, Sequence[str]]]:
    """The model of a checkpoint and its dtypes, in a folder beside `target` that is gone at the end."""
    # transformers reads it when it is imported: one file needs no progress bar.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    torch.set_num_threads(num_threads(job.recipe.launch.threads))
    model = load_model(job, PluginSet.load([("model", job.recipe.model.plugin)]))
    layout = _adapted(job.recipe.policy)
    module = model.build(seed=job.recipe.run.seed, dtype=torch.float32, device=torch.device("cpu"), layout=layout)
    path = path_of(job.checkpoints, step)
    load_weights(module, path, is_average=is_average)
    if layout is not None and (expected := read_place(path).below):
        found = frozen_digest(module, 0, lambda said: [said])
        check_below(path, expected=expected, found=found, name=job.recipe.model.path or DRAWN)
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        partial.mkdir(parents=True)
        written = model.export(module, partial, dtype=None if dtype is None else torch_dtype(dtype))
        yield partial, tuple(map(dtype_name, written))
    except OSError as error:
        raise CheckpointError(f"{target} could not be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def choose_step(job: Job, step: str) -> int:
    """The step of the checkpoint that `step` (a number, `best` or `latest`) means.

    `best` and `latest` are of what the run came to: a checkpoint that its journal does not know, or whose step was
    undone since, is passed over, as when the run goes on. A number takes any, and `latest` does where there is no
    journal that can be read.
    """
    steps = completed(job.checkpoints)
    if not steps:
        raise CheckpointError(
            f"{job.checkpoints}: no complete checkpoint; one is saved at the end of a run, on Ctrl-C, and every "
            "policy.checkpoint.interval steps"
        )
    if step == "latest":
        return _latest(job, steps)
    if step == "best":
        return _best(job, steps)
    if not step.isdecimal():
        raise ConfigError(f"--step: {step!r} is neither a number nor 'best' nor 'latest'")
    if int(step) not in steps:
        raise CheckpointError(f"{job.checkpoints}: no checkpoint of step {step}; there are {_listed(steps)}")
    return int(step)


def load_weights(module: torch.nn.Module, path: str, *, is_average: bool = False) -> None:
    """Overwrite a module's weights with those of a checkpoint.

    With `is_average` it takes the average of the weights, as far as there is one.
    """
    averaged = averaged_tensors(module) if is_average else {}
    tensors = {
        f"{AVERAGE if name in averaged else 'model'}.{name}": local_shard(tensor)
        for name, tensor in trained_tensors(module).items()
    }
    load_shares(path, tensors)


def _is_average(policy: PolicyConfig, asked: bool | None) -> bool:
    """True if to export the average; raises ConfigError if it is asked for, and the run keeps none."""
    if policy.average is None:
        if asked:
            raise ConfigError("--average: the run's recipe has no [policy.average], so its checkpoints have none")
        return False
    return policy.average.is_exported if asked is None else asked


def _adapted(policy: PolicyConfig) -> Layout | None:
    """A layout of one process with the adapters of a run, whose checkpoints have them; None for one without."""
    if policy.lora is None:
        return None
    return layout_of(PolicyConfig(lora=policy.lora), single_world().mesh, "cpu")


def _latest(job: Job, steps: list[int]) -> int:
    try:
        known = _known(replay(job.journal), steps)
    except JournalError as error:
        # The controller of a run that goes on has the journal to itself.
        why = "the run goes on" if is_held(job.directory) else f"whether it was undone since is not known: {error}"
        _LOG.warning("%s: the newest checkpoint is taken, of step %d; %s", job.directory, steps[-1], why)
        return steps[-1]
    # One that is older than what is taken may be damaged.
    newest = next((step for step in reversed(known) if _is_genuine(job, step, known)), None)
    if newest is None:
        raise CheckpointError(
            f"{job.checkpoints}: the journal knows none of the complete checkpoints, {_listed(steps)}, or their steps "
            "were undone since; --step takes one of them all the same"
        )
    if later := [step for step in steps if step > newest]:
        _LOG.warning(
            "%s: passed over step %s, which the journal does not know, or which was undone since",
            job.checkpoints,
            _listed(later),
        )
    return newest


def _known(state: State, steps: list[int]) -> dict[int, int]:
    """The complete checkpoints that the journal knows, oldest first, each with the gradient group of the step."""
    return {step: state.marks[step].generation for step in steps if step in state.marks}


def _is_genuine(job: Job, step: int, known: Mapping[int, int]) -> bool:
    return read_place(path_of(job.checkpoints, step)).is_genuine(known[step])


def _best(job: Job, steps: list[int]) -> int:
    state = replay(job.journal)
    known, found = _known(state, steps), best_checkpoint(state)
    if found is None:
        raise CheckpointError(
            f"{job.directory}: no checkpoint was evaluated, so none is the best; there are {_listed(known)}"
        )
    if found not in known or not _is_genuine(job, found, known):
        others = [step for step in known if step != found]
        raise CheckpointError(f"{job.checkpoints}: step {found} was the best, but is gone; there are {_listed(others)}")
    return found


def _listed(steps: Iterable[int]) -> str:
    return ", ".join(map(str, steps)) or "none"
