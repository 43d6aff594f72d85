"""Hugging Face reward models: sequence classifiers that score a prompt and its completion."""
