"""Datasets of world models: videos with captions, prompts alone, and made-up ones."""
