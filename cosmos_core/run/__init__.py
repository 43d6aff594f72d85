"""From a recipe to a finished run: plan, launch, supervise, summarise.

What `cosmos` does is in `command` (run, plan), `submit` (launch), `replica`, `settings` (set), `status`, `watch`,
`audit`, `recovery` and `artifacts` (export, generate, eval). Their layers are in `pyproject.toml`, enforced.
"""
