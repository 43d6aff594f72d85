"""The folder of a run, and what others find out from it: its files, its provenance, its controller."""
