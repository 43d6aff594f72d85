"""Attention over packed documents, on one process or spread along the sequence."""
