"""What each preset learns on a CPU: `python benchmarks/presets.py [--presets A,B] [--set k=v ...]`.

The recipe of each is run whole, from weights that are drawn at random, warm-up included, one after the other; `s` is
of the whole command, and `CPU s` of all processes from start to end, which another load on the machine changes least.
Those that learn from a teacher need one, which is trained first and not counted. Rewards of videos are scored in the
run's own processes, without the service that the recipes name.

`before` and `after` are of the measure that is named: what is held out before and after the preset's own steps, or what
the steps measure of their batches before they learn from them, the mean of the first and of the last tenth. One that a
run does not have ends the benchmark. `--set` is for the presets, and not for the teacher.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
from running.whole import Whole, adopt_orphans, command, run_whole

RECIPES: Final = Path(__file__).parents[1] / "recipes"
TEACHER: Final = "teacher"


@attrs.frozen(kw_only=True)
class Preset:
    """How a preset is run.

    Attributes:
        recipe: File in the folder of recipes.
        algorithm: Its name; the recipe's own if empty.
        measure: What tells that it learnt: a figure of evaluations, or one of the summary's `measures`.
        options: More arguments of `cosmos run`.
        is_taught: Whether it learns from the teacher.
    """

    recipe: str
    measure: str
    algorithm: str = ""
    options: Sequence[str] = ()
    is_taught: bool = False

    @property
    def arguments(self) -> list[str]:
        """Of `cosmos run`, after the recipe."""
        return [*(["--algorithm", self.algorithm] if self.algorithm else []), *self.options]

    @property
    def line(self) -> str:
        """The command, as people type it."""
        return " ".join(["cosmos run", f"recipes/{self.recipe}", *self.arguments])


def rewarded(algorithm: str, *options: str) -> Preset:
    """One that learns arithmetic from rewards."""
    return Preset(recipe="arithmetic.toml", algorithm=algorithm, measure="accuracy", options=options)


def preferring(algorithm: str) -> Preset:
    """One that learns arithmetic from preferences."""
    return Preset(recipe="dpo-arithmetic.toml", algorithm=algorithm, measure="preference_accuracy")


def filmed(name: str) -> Preset:
    """One that learns to make videos of a colour from rewards."""
    return Preset(recipe=f"wfm/wan-tiny-{name}.toml", measure="reward", options=("--reward", "colour"))


def taught(*options: str) -> Preset:
    """One that learns from a teacher."""
    return Preset(recipe="distill-arithmetic.toml", measure="teacher_kl", options=options, is_taught=True)


PRESETS: Final[Mapping[str, Preset]] = {
    **{name: rewarded(name) for name in ("grpo", "dr-grpo", "dapo", "gspo", "cispo", "rloo", "reinforce-plus-plus")},
    **{name: rewarded(name) for name in ("aipo", "decoupled-ppo", "tis", "icepop", "sequence-masking")},
    "ppo": rewarded("ppo", "--set", "critic={}"),
    "sft": Preset(recipe="sft-arithmetic.toml", measure="loss"),
    **{name: preferring(name) for name in ("dpo", "ipo", "bco")},
    "distill": taught(),
    "distill-sampled": taught("--set", "algorithm.options.estimate=sampled"),
    "flow-grpo": filmed("grpo-fast"),
    "ddrl": filmed("ddrl"),
    "diffusion-nft": filmed("nft"),
    "sft-videos": Preset(recipe="wfm/wan-tiny-sft.toml", measure="loss"),
}


def before_and_after(summary: Mapping[str, Any], measure: str) -> tuple[float, float]:
    """The measure before and after; what was not measured is no number.

    Raises:
        LookupError: There is no such measure.
    """
    if f"heldout_{measure}_before" in summary:
        found = [summary[f"heldout_{measure}_{when}"] for when in ("before", "after")]
    elif measure in (measures := summary["measures"]):
        found = [measures[measure].get(when) for when in ("first", "last")]
    else:
        raise LookupError(f"no measure {measure!r}, neither held out nor among {', '.join(measures)}; mend PRESETS")
    before, after = (float("nan") if value is None else float(value) for value in found)
    return before, after


def train_teacher(folder: Path) -> Path:
    """The model that others learn from, exported."""
    run_whole(folder, TEACHER, str(RECIPES / PRESETS["sft"].recipe))
    command("export", str(folder / TEACHER))
    return folder / TEACHER / "export"


def row(name: str, ran: Whole) -> str:
    """A Markdown row of the table."""
    preset = PRESETS[name]
    before, after = before_and_after(ran.summary, preset.measure)
    measure = preset.measure.replace("_", " ")
    held_out = "held-out " if f"heldout_{preset.measure}_before" in ran.summary else ""
    cells = (name, f"`{preset.line}`", f"{held_out}{measure}", f"{before:.3f}", f"{after:.3f}")
    return "| " + " | ".join((*cells, f"{ran.seconds:.0f}", f"{ran.cpu_s:.0f}")) + " |"


def main() -> None:
    """Run them, and print a row for each as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", default=",".join(PRESETS), help="which, separated by commas")
    parser.add_argument("--set", action="append", default=[], metavar="K=V", dest="settings", help="as of cosmos run")
    options = parser.parse_args()
    chosen = options.presets.split(",")
    if unknown := [name for name in chosen if name not in PRESETS]:
        parser.error(f"--presets: no {', '.join(unknown)}; there are {', '.join(PRESETS)}")
    overrides = [argument for setting in options.settings for argument in ("--set", setting)]
    adopt_orphans()
    print("| preset | command | measure | before | after | s | CPU s |")
    print("|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory(prefix="cosmos-presets-") as folder:
        teacher: Path | None = None
        for number, name in enumerate(chosen):
            preset = PRESETS[name]
            arguments = [str(RECIPES / preset.recipe), *preset.arguments, *overrides]
            if preset.is_taught:
                teacher = teacher or train_teacher(Path(folder))
                arguments += ["--set", f"teacher.path={teacher}"]
            print(row(name, run_whole(Path(folder), f"preset-{number}", *arguments)), flush=True)


if __name__ == "__main__":
    main()
