from tests.sockets import context, friend, keys, knock, listener

__all__ = ["context", "friend", "keys", "knock", "listener"]
