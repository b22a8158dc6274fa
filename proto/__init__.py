"""Contracts every other package builds on: hashing, events, the index, HTTP structs, errors."""
