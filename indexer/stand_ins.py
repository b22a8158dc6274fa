"""Stand-ins for what of a prompt cannot be tokenised here: enough to send a conversation back to where it was.

Strategy. Blocks that depend on an image cannot be named (docs/front-door.md), so the index is of no help with them,
and a conversation about an image would lose its replica at every turn. But a router knows what it sent where
(placement.py), and for that any name will do that is the same for the same content. So the rest of the prompt becomes
stand-ins, message by message: about as many as it will be tokens, each message's drawn from a digest of its JSON.
Chained behind the tokens that are known, under the caller's salt like these, they make a conversation's next turn
find its own beginning.

Invariants: stand-ins are at least FIRST, which no tokenizer's ids reach, so they never match what an engine stored; a
message's stand-ins depend on that message alone, so a longer conversation begins with those of the shorter one.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Any, Final

import msgspec

FIRST: Final = 1 << 31
MOST: Final = 1 << 17
"""Stand-ins of one prompt; what is beyond them is not named."""
CHARACTERS: Final = 4
"""Of text in a token, about."""
MEDIA_TOKENS: Final = 1024
"""What an image becomes, about, however many bytes it has: it depends on the model, and hardly on the compression."""

_encode = msgspec.json.Encoder(order="deterministic").encode


def stand_ins(parts: Sequence[Any]) -> list[int]:
    """Of messages, or of one prompt, in order; at least one. Linear in their size: a megabyte takes milliseconds."""
    found = array("I")
    for part in parts:
        count = max(1, min(about(part), MOST - len(found)))
        digest = array("I", hashlib.sha256(_encode(part)).digest())
        words = array("I", (FIRST | word for word in digest))
        found += (words * (count // len(words) + 1))[:count]
        if len(found) >= MOST:
            break
    return found.tolist() or [FIRST]


def about(part: Any) -> int:
    """How many tokens a message or prompt becomes, about."""
    match part:
        case str() as text:
            return len(text) // CHARACTERS
        case {"role": _}:
            content = part.get("content")
            return sum(map(about, content)) if isinstance(content, list) else about(content)
        case {"text": str() as text}:
            return len(text) // CHARACTERS
        case {"type": _}:
            return MEDIA_TOKENS
        case [int(), *_]:
            return len(part)
    return 0
