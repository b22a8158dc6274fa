"""metatrie: which LLM engine replica holds which KV-cache blocks, and the router that uses it."""

__version__ = "0.1.0"
