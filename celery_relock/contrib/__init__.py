"""Support for other software. Import only the modules that you use."""
