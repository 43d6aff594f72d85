"""`cosmos plugins check`: metadata, compatibility, files, import and the conformance kit, as one verdict."""
