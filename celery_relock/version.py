"""The version: here, as a frozen program has no metadata of its packages."""

__version__ = "0.2.0"
