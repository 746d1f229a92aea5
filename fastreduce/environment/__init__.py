"""What surrounds the library: our environment variables, packages that may be missing, folders for caches."""
