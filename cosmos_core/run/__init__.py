"""From a recipe to a finished run: plan, launch, supervise, summarise.

What `cosmos` does is in `command` (run, plan), `submit` (launch), `new` (replica), `setting` (set), `watching`
(status, audit) and `artifacts` (export, generate, eval). They stand on

- `planning`: from a recipe to a job, and what makes it impossible;
- `launch`: starting processes, here and elsewhere;
- `supervising`: who runs, who has ended, who takes their place, and what a terminal is told of it;
- `following`: a run that goes on, seen through its controller or its journal;
- `files`: the folder of a run;
- `hooks`: lifecycle hooks beside the run;
- `reporting`: what came of it.

Their layers are in `pyproject.toml`, enforced.
"""
