from tests.health_worlds import world

__all__ = ["world"]
