"""`cosmos plugins check`: metadata, import time, options, compatibility and the conformance kit, as one verdict."""
