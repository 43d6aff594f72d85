"""The environment `calculator`."""
