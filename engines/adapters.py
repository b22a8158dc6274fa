"""What is known of every engine family, version by version: one table, from which docs/engines.md is generated.

Decoding is tolerant and counting is the same for all, so an adapter is data: how blocks are named, where to ask for
event sources, and what a range of versions does not tell. Each limit says what becomes of it here, and what an
operator can do. The facts are those of the wire-format notes; tests/engines_all checks the table against samples,
recordings and the documentation.

    python -m metatrie.engines.adapters      prints the tables of docs/engines.md
"""

from __future__ import annotations

from typing import Final

from ..proto.engine import EngineAdapter, Limit, Range
from ..proto.errors import ConfigError
from .rules import rule_for

Version = tuple[int, ...]

_ALL: Final = Range()


def _before(*until: int) -> Range:
    return Range(until=until)


def _since(*first: int) -> Range:
    return Range(first=first)


_VLLM: Final = EngineAdapter(
    name="vllm",
    title="vLLM",
    rule=rule_for("vllm"),
    oldest=(0, 9, 0),
    newest=(0, 33, 0),
    evidence="recorded",
    discovery="/kv_event_sources",
    limits=(
        Limit(
            Range((0, 9, 0), (0, 10, 2)),
            "with `--prefix-caching-hash-algo sha256` no batch can be encoded: the stream is all holes",
            "degraded",
            "use the default `builtin`, or upgrade to 0.10.2",
        ),
        Limit(
            _before(0, 10, 2),
            "names cannot be predicted, so hidden inputs are found out only where they collide",
            "undetected",
            "do not use cache salts or LoRA, or upgrade",
        ),
        Limit(
            Range((0, 9, 0), (0, 9, 2)),
            "no data-parallel rank on the wire, no port offset per rank",
            "undetected",
            "one engine per rank, each with its own port",
        ),
        Limit(
            _before(0, 11, 1), "LoRA together with events stops the engine (seen in 0.11.0)", "degraded", "upgrade"
        ),
        Limit(
            _before(0, 14, 0),
            "LoRA adapters have a number and no name on the wire",
            "exact",
            "upgrade for hits under adapters",
        ),
        Limit(
            Range((0, 10, 2), (0, 17, 0)),
            "cache salts and media are not on the wire",
            "exact",
            "set the fleet's hash seed and `sha256_cbor`: without parity such blocks cannot be told from plain ones",
        ),
        Limit(
            Range((0, 17, 0), (0, 19, 0)),
            "media identifiers come without their offset",
            "exact",
            "upgrade for hits on prompts with media",
        ),
        Limit(
            Range((0, 11, 0), (0, 24, 0)),
            "offloaded blocks are announced by name only",
            "exact",
            "nothing: they count as soon as the block itself was announced",
        ),
        Limit(
            Range((0, 20, 0), (0, 22, 0)),
            "cache groups have a number and no kind, so what a hit needs of them is unknown",
            "degraded",
            "upgrade hybrid models to 0.22",
        ),
        Limit(
            _since(0, 24),
            "offloaded blocks are placeholders, and a removal names only a chunk's last block",
            "exact",
            "set `kv_connector_extra_config.self_describing_kv_events` for full-attention models",
        ),
        Limit(
            _since(0, 26),
            "report mode `full` (a request can ask for it) announces reused blocks again, without end",
            "undetected",
            'refuse it at the front, or set `copy_mode = "set"` for that replica',
        ),
        Limit(
            _since(0, 31),
            "names of blocks under an adapter depend on its path, which is not on the wire",
            "exact",
            "nothing: their keys are computed from tokens and adapter name",
        ),
        Limit(
            _since(0, 33),
            "with EAGLE or MTP drafting and no KV connector, a block also depends on tokens after it",
            "degraded",
            "declare how many: `lookahead` in `[namespace]`, one namespace for all engines of the model",
        ),
        Limit(
            _ALL,
            "`AllBlocksCleared` waits for the next step with a request",
            "undetected",
            "send one request after a cache reset or weight reload",
        ),
        Limit(
            _ALL,
            "Mooncake store and LMCache connectors announce stores and never removals",
            "not_indexed",
            'set `ignore_media = ["cpu", "cxl"]` for that replica',
        ),
    ),
)

_SGLANG_LIMITS: Final = (
    Limit(
        _before(0, 5, 4),
        "names do not bind the prefix, and a split announces both halves again",
        "degraded",
        "upgrade to 0.5.6",
    ),
    Limit(
        Range((0, 5, 4), (0, 5, 6)),
        "not looked at",
        "undetected",
        "upgrade to 0.5.6",
    ),
    Limit(
        _before(0, 5, 9),
        "no medium on the wire: every tier counts as GPU memory",
        "undetected",
        "upgrade before using the hierarchical cache",
    ),
    Limit(_before(0, 5, 20), "cache salts are not on the wire", "undetected", "no salts, or upgrade"),
    Limit(_before(0, 5, 22), "LoRA adapters are not on the wire", "undetected", "no adapters, or upgrade"),
    Limit(
        _ALL,
        "with EAGLE drafting, pages are named by pairs of tokens",
        "degraded",
        "declare `lookahead = 1` in `[namespace]`, and a page size equal to the block size",
    ),
)

_SGLANG: Final = EngineAdapter(
    name="sglang",
    title="SGLang",
    rule=rule_for("sglang"),
    oldest=(0, 4, 9),
    newest=(0, 5, 23),
    evidence="recorded",
    discovery="/server_info",
    limits=(
        *_SGLANG_LIMITS,
        Limit(
            _ALL,
            "format `default`: an `extra_key` separates caches and shows nowhere, not even in names",
            "undetected",
            "do not use `extra_key`, or set the event format `dynamo` and `--engine sglang-dynamo`",
        ),
    ),
)

_SGLANG_DYNAMO: Final = EngineAdapter(
    name="sglang-dynamo",
    title="SGLang, event format `dynamo`",
    rule=rule_for("sglang-dynamo"),
    oldest=(0, 5, 20),
    newest=(0, 5, 23),
    evidence="recorded",
    discovery="/server_info",
    limits=(
        *_SGLANG_LIMITS[-1:],
        Limit(
            _ALL,
            "an `extra_key` shows in names only",
            "exact",
            "nothing: such names are mispredicted and left out",
        ),
    ),
)

_TRTLLM: Final = EngineAdapter(
    name="trtllm",
    title="TensorRT-LLM, through `metatrie relay`",
    rule=rule_for("trtllm"),
    oldest=None,
    newest=None,
    evidence="source",
    limits=(
        Limit(
            _ALL,
            "LoRA adapters are not told, and names are not predicted",
            "undetected",
            "no adapters, or a model name of their own for engines with them",
        ),
        Limit(
            _ALL, "media are named by keys no prompt can be matched by", "exact", "nothing: such blocks are left out"
        ),
        Limit(
            _ALL,
            "whoever takes the events has them, and the buffer drops its oldest",
            "degraded",
            "one relay per engine, and a large `event_buffer_max_size`",
        ),
        Limit(_ALL, "partial blocks", "exact", "nothing: they are left out, with all that follows them"),
    ),
)

_DYNAMO: Final = EngineAdapter(
    name="dynamo",
    title="Dynamo's relay",
    rule=rule_for("dynamo"),
    oldest=None,
    newest=None,
    evidence="source",
    limits=(
        Limit(_ALL, "no replay: a late start or a gap is a loss", "degraded", "subscribe before the engine starts"),
        Limit(_ALL, "no medium: every tier counts as GPU memory", "undetected", "subscribe to the engine itself"),
        Limit(_ALL, "groups other than global attention are dropped", "undetected", "no hybrid models"),
    ),
)

_MOONCAKE: Final = EngineAdapter(
    name="mooncake",
    title="Mooncake master",
    rule=rule_for("mooncake"),
    oldest=None,
    newest=None,
    evidence="source",
    limits=(
        Limit(_ALL, "no token ids, so no block can be placed", "not_indexed", "subscribe to the engines"),
        Limit(_ALL, "sequence numbers start at 1, and there is no replay", "degraded", "as above"),
    ),
)

_LMCACHE: Final = EngineAdapter(
    name="lmcache",
    title="LMCache's connector",
    rule=rule_for("lmcache"),
    oldest=None,
    newest=None,
    evidence="source",
    limits=(
        Limit(
            _ALL,
            "chunks of another size under names of its own, never removed",
            "not_indexed",
            "nothing: they are counted by medium, and no prompt matches them",
        ),
    ),
)

ADAPTERS: Final[dict[str, EngineAdapter]] = {
    adapter.name: adapter for adapter in (_VLLM, _SGLANG, _SGLANG_DYNAMO, _TRTLLM, _DYNAMO, _MOONCAKE, _LMCACHE)
}


def adapter_for(engine: str) -> EngineAdapter:
    """Raises ConfigError for a family nobody knows."""
    try:
        return ADAPTERS[engine]
    except KeyError:
        known = ", ".join(ADAPTERS)
        raise ConfigError("engine", f"{engine!r} is no engine family", f"use one of: {known}") from None


_EVIDENCE: Final = {
    "recorded": "recorded streams with the engine's own tables, and samples",
    "samples": "samples",
    "source": "its source, no recording",
}
_EFFECTS: Final = {
    "exact": "left out, and the rest stays exact",
    "degraded": "the replica's state is `degraded`, with the cause",
    "not_indexed": "counted, not indexed",
    "undetected": "**not noticed**: nothing on the wire shows it",
}


def _text(version: Version | None) -> str:
    return "" if version is None else ".".join(map(str, version))


def _span(span: Range) -> str:
    if span.first is None and span.until is None:
        return "all"
    if span.until is None:
        return f"from {_text(span.first)}"
    return f"{_text(span.first)} to before {_text(span.until)}" if span.first else f"before {_text(span.until)}"


def support_tables() -> str:
    """The generated part of docs/engines.md, in Markdown."""
    lines = [
        "| `--engine` | engine | versions | rests on | sources can be asked for |",
        "|---|---|---|---|---|",
    ]
    for adapter in ADAPTERS.values():
        versions = f"{_text(adapter.oldest)} to {_text(adapter.newest)}" if adapter.oldest else "see below"
        asked = f"`GET {adapter.discovery}`" if adapter.discovery else "no"
        lines.append(f"| `{adapter.name}` | {adapter.title} | {versions} | {_EVIDENCE[adapter.evidence]} | {asked} |")
    for adapter in ADAPTERS.values():
        lines += [
            "",
            f"### {adapter.title}",
            "",
            "| versions | what is not told | here | what to do |",
            "|---|---|---|---|",
        ]
        for limit in adapter.limits:
            lines.append(f"| {_span(limit.versions)} | {limit.what} | {_EFFECTS[limit.effect]} | {limit.remedy} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    import sys

    sys.stdout.write(support_tables())
