"""What metatrie costs: hot paths, Redis layouts, growth, beside a peer, and over a long time."""

from .run import command

__all__ = ["command"]
