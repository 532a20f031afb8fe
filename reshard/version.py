"""The version of this tool, as manifests record it."""

__version__ = "0.1.0"
