"""Problems of the reasoning-gym library as a dataset, and its verifiers as a reward."""
