"""`python -m cosmos_core.run.launch.kubernetes.controller RECIPE`: what runs in the controller's pod.

It makes the recipe's run on the shared volume, or goes on with it if it is there: a pod that was moved or restarted
does what the first one did.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from cosmos_core.config.loading import load_recipe
from cosmos_core.errors import CosmosError
from cosmos_core.run import folder
from cosmos_core.run.command import resume_run, run_recipe


def main(arguments: Sequence[str]) -> int:
    """Supervise the run; the exit code: 0 if it finished, or was stopped with a checkpoint to go on from later."""
    recipe_path = Path(arguments[0])
    console = Console(width=120)
    try:
        recipe = load_recipe(recipe_path)
        directory = Path(recipe.run.output_dir) / recipe.run.name
        if folder.is_run(directory):
            # The controller of an earlier pod is gone, and a process of this pod may have its number.
            (directory / "controller.json").unlink(missing_ok=True)
            outcome = resume_run(directory, console)
        else:
            outcome = run_recipe(recipe, recipe_path, console, overwrite=False)
    except CosmosError as error:
        console.print(f"cosmos: {error}", highlight=False, markup=False, soft_wrap=True)
        return 1
    return 0 if outcome == "finished" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
