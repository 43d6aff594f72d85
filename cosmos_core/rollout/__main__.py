"""`python -m cosmos_core.rollout`: a rollout replica's process."""

from __future__ import annotations

from cosmos_core.replica.process import run_role
from cosmos_core.rollout.replica import main

if __name__ == "__main__":
    run_role("rollout", main)
