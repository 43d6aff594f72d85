"""What a hook shares with the whole process, and must leave alone."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence

import attrs

# pytest keeps its own account there.
_IGNORED = "PYTEST_CURRENT_TEST"


@attrs.frozen(kw_only=True)
class Surroundings:
    """The process at one moment.

    Attributes:
        directory: The working directory.
        environment: Environment variables.
        disabled: The level up to which `logging.disable` silences every logger.
        root_level: The level of the root logger.
    """

    directory: str
    environment: Mapping[str, str]
    disabled: int
    root_level: int

    @classmethod
    def look(cls) -> Surroundings:
        """The process at this moment."""
        return cls(
            directory=os.getcwd(),  # noqa: PTH109 - kept as text, to be compared and shown
            environment={name: value for name, value in os.environ.items() if name != _IGNORED},
            disabled=logging.root.manager.disable,
            root_level=logging.root.level,
        )

    def restore(self) -> None:
        """Make the process what it was."""
        os.chdir(self.directory)
        for name in self.environment_changed(Surroundings.look()):
            os.environ.pop(name, None)
            if name in self.environment:
                os.environ[name] = self.environment[name]
        logging.disable(self.disabled)
        logging.root.setLevel(self.root_level)

    def environment_changed(self, later: Surroundings) -> list[str]:
        """Names of the variables that were set, changed or removed since."""
        names = {*self.environment, *later.environment}
        return sorted(name for name in names if self.environment.get(name) != later.environment.get(name))

    def problems(self, later: Surroundings, allowed: Sequence[str]) -> Iterator[str]:
        """What changed since and should not have; variables that begin with one of `allowed` may change."""
        if later.directory != self.directory:
            yield f"changed the working directory to {later.directory}; use absolute paths"
        names = [name for name in self.environment_changed(later) if not name.startswith(tuple(allowed))]
        if names:
            yield (
                f"changed the environment variables {', '.join(names)}, which the run's processes inherit; give "
                "settings to the library itself, or name the library's prefix in `own_variables` of the test class"
            )
        if later.disabled != self.disabled:
            yield "called logging.disable, which silences the run; set the level of its own logger"
        if later.root_level != self.root_level:
            level = logging.getLevelName(later.root_level)
            yield f"set the level of the root logger to {level}; set the level of its own logger"
