"""The device mesh of a policy replica, and how a module is laid out on it."""
