"""The embedded engine: continuous batching of any Hugging Face causal language model, in this process."""
