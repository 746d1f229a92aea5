"""A cost model of gradient averaging on many hosts, and its check against ranks in network namespaces."""
