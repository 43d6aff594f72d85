"""Weights of Hugging Face models in files: configuration, names, reading into shards, writing."""
