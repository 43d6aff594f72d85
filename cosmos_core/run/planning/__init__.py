"""Turns a recipe into a job, tells what it needs, and refuses what cannot run. No process of the run starts here."""
