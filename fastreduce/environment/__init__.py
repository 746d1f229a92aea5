"""What surrounds the library: environment variables, packages that may be missing, caches, the process's end."""
