"""The vLLM engine: vLLM generates, in this process, under weights that the project writes into it."""
