"""Takes a recipe to a finished run: plans, launches, supervises and summarises.

The commands of `cosmos` are in `command` (run, plan), `submit` (launch), `replica`, `settings` (set), `status`,
`resume` and `export`. Their layers are in `pyproject.toml`, enforced.
"""
