"""The exception tree: every error that cosmos-core raises on purpose is a `CosmosError`.

A message says what happened, where, the value seen, and what to do next. The command line prints
it without a traceback; `--debug` shows the traceback as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class CosmosError(Exception):
    """Root of every error raised on purpose."""


class ConfigError(CosmosError):
    """A recipe or an override is wrong; the message names the key's path and the value seen."""


class UnevenError(ConfigError):
    """An axis of the mesh does not divide a number of a model."""


class UntriedError(CosmosError):
    """A model could not be tried on a small one of its make: nothing is known of it; the message says why."""


class PluginError(CosmosError):
    """Root of what can go wrong with a plugin."""


class PluginNotFoundError(PluginError):
    """No installed distribution provides this name."""


class PluginConflictError(PluginError):
    """Two distributions provide one name, and the recipe did not say which."""


class PluginBrokenError(PluginError):
    """A selected plugin could not be imported or does not implement its protocol."""


class PluginIncompatibleError(PluginError):
    """A plugin was built for another version of cosmos-core or of its protocol."""


class DataError(CosmosError):
    """A dataset, a row or a tokenizer is unusable; the message names file, line and reason."""


class StorageError(CosmosError):
    """A store of files is out of reach, refuses, or lacks what it should have; the message names URL and reason."""


class TransportError(CosmosError):
    """A message or a payload could not be sent, received or decoded."""


class RefusedError(TransportError):
    """The other side does not let this one in, or is not who it should be: waiting does not help."""


class JournalError(CosmosError):
    """The controller's journal could not be written or read."""


class DamagedJournalError(JournalError):
    """The content of a journal is not what a controller wrote."""


class WeightSyncError(CosmosError):
    """A weight transfer failed, or what was loaded does not match its digest."""


class AttestationError(WeightSyncError):
    """An engine has loaded other weights than it should: it must not generate with them."""


class CheckpointError(CosmosError):
    """A checkpoint could not be written, read, or does not fit the run."""


class DamagedCheckpointError(CheckpointError):
    """The content of a checkpoint is not what was written, or not all of it is there."""


class EngineError(CosmosError):
    """A rollout engine refused a request or failed."""


class TrainingError(CosmosError):
    """A training step cannot go on (too many non-finite steps, a lost gradient group)."""


class ReplicaError(CosmosError):
    """A replica failed, was fenced, or did not appear in time."""


class UnknownSubmissionError(ReplicaError):
    """A scheduler may have taken a run, or not: it may start."""


class ProcessLostError(ReplicaError):
    """A process of this replica ended without a word: nothing is wrong with the run, another can take its place."""


class EngineLostError(EngineError, ProcessLostError):
    """A process that a rollout engine needs is gone without a word, or does not answer: its replica ends with it."""


@contextlib.contextmanager
def told_as(kind: type[CosmosError], what: str) -> Iterator[None]:
    """Raise what a plugin raises within as an error of this kind, after `what`; a CosmosError speaks for itself."""
    try:
        yield
    except CosmosError:
        raise
    except Exception as error:
        raise kind(f"{what}: {type(error).__name__}: {error}") from error
