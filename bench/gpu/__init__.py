"""Half an hour on a GPU: every case is a line on disk as soon as it is known; tables are made of them later."""
