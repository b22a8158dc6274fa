"""A multi-turn workload of real text, from documents every Python installation has.

Many users each pick a document and ask about it over several turns; all share one system prompt. Popular documents
are asked about by many users, as in a support desk or a code assistant. Everything is derived from a seed, so two
runs send the same conversations in the same order.
"""

from __future__ import annotations

import itertools
import random
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

SYSTEM_PROMPT_CHARS = 1_200
_SKIP = 200

_QUESTIONS = (
    "Summarise the document in three sentences.",
    "Which rules does it state that a beginner would get wrong?",
    "Quote the sentence that matters most, and say why.",
    "What does it leave open?",
    "Give a short example that follows from it.",
    "How would you explain this to somebody who knows another language?",
    "Which terms does it define, and where?",
    "What changed in this area over the years?",
)


class WorkloadConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Size of a workload. Users arrive over `ramp_s`. Before each turn they read for `read_s`, and then think for
    `think_s` on average."""

    users: int = 48
    turns: int = 4
    documents: int = 20
    document_chars: int = 4_000
    output_tokens: int = 32
    ramp_s: float = 7.0
    read_s: float = 0.4
    think_s: float = 0.6
    seed: int = 7


class Conversation(msgspec.Struct, frozen=True):
    """One user's plan: when to start, what to ask, how long to think before each turn."""

    start_s: float
    system: str
    document: str
    questions: Sequence[str]
    pauses_s: Sequence[float]

    def opening(self) -> list[dict[str, Any]]:
        """Messages before the first question is appended."""
        return [
            {"role": "system", "content": self.system},
            {"role": "user", "content": f"Here is a document.\n\n{self.document}\n\nQuestions follow."},
            {"role": "assistant", "content": "Go ahead."},
        ]


def documents(count: int, chars: int) -> list[str]:
    """`count` pieces of documentation of `chars` characters, the same on every call.

    Taken from the language reference that ships with Python; where a distribution left that out, from the standard
    library's sources. Raises FileNotFoundError if there is neither.
    """
    try:
        from pydoc_data.topics import topics

        texts: list[str] = [topics[name] for name in sorted(topics)]
    except ImportError:
        library = Path(sysconfig.get_paths()["stdlib"])
        texts = [path.read_text("utf-8", "replace") for path in sorted(library.glob("*.py"))[:200]]
    pieces = [
        text[start : start + chars] for text in texts for start in range(0, max(0, len(text) - chars), chars + _SKIP)
    ]
    if len(pieces) < count:
        raise FileNotFoundError(f"this Python ships no text long enough for {count} documents of {chars} characters")
    return random.Random(count).sample(pieces, count)


def conversations(config: WorkloadConfig) -> list[Conversation]:
    """Every user's plan, in order of arrival. Document popularity falls with rank as in Zipf's law."""
    rng = random.Random(config.seed)
    texts = documents(config.documents + 1, max(config.document_chars, SYSTEM_PROMPT_CHARS))
    system = "You answer questions about documents. House style:\n" + texts.pop()[:SYSTEM_PROMPT_CHARS]
    weights = list(itertools.accumulate(1 / (rank + 1) for rank in range(len(texts))))
    return [
        Conversation(
            start_s=config.ramp_s * user / max(1, config.users),
            system=system,
            document=rng.choices(texts, cum_weights=weights)[0][: config.document_chars],
            questions=rng.sample(_QUESTIONS, k=min(config.turns, len(_QUESTIONS))),
            pauses_s=[config.read_s + rng.expovariate(1 / config.think_s) for _ in range(config.turns)],
        )
        for user in range(config.users)
    ]
