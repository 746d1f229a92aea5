"""Ranks that are killed and come again: what it costs, and whether it trains as well."""
