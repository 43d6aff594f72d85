"""Messages and payloads between the processes of a run: records, codecs, sockets, delivery."""
