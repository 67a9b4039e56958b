"""evalkit: what a KV-cache policy costs in accuracy, and what it buys."""

__version__ = "0.1.0"
