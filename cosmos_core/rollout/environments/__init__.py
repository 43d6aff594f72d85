"""The environments that come with the core, each a plugin like any other."""
