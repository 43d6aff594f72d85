"""The `cosmos` command. Each command imports what it needs when it runs, so that `cosmos --help` is instant."""
