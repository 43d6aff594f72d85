"""`cosmos plugins new`: a complete package for a new plugin, from the templates in `cosmos_core/plugins/templates`."""

from cosmos_core.plugins.scaffold.making import new_package
from cosmos_core.plugins.scaffold.naming import Names

__all__ = ["Names", "new_package"]
