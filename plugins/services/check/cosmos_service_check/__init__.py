"""The check of a plugin's distribution before it is published: metadata, files, import and conformance kit."""
