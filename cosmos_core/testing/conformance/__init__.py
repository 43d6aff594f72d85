"""Conformance kits: one class per plugin kind. Inherit it in a test module, name the plugin, and it is proven.

What a plugin declares in its capabilities is tested; what it does not declare must be refused.
"""
