"""Tools for those who work on the repository; not part of the package."""
