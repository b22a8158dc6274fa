"""Which models there are: their names at clients and engines, adapters, and how their prompts become token ids.

A name a client sends may be a model's own (its namespaces'), an alias, or a LoRA adapter's. Adapters are declared,
or learned from the engines: vLLM lists each under `/v1/models` with its base model as `parent`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import msgspec

from ..proto.errors import ConfigError

MAX_CARDS = 1024
"""Models one engine may list; the rest are ignored."""

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is declared about one model, under the name its engines and namespaces have for it."""

    tokenizer: str = "engine"
    """`engine`: asks the engines' own /tokenize. Else a directory with tokenizer.json and chat template, or `byte`:
    the text is tokenised here."""
    content_format: Literal["auto", "string", "openai"] = "auto"
    """How the engine hands message content to the template, if it was told to (`--chat-template-content-format`)."""
    chat_template_kwargs: dict[str, Any] = {}
    """Its `--default-chat-template-kwargs`; a request's own win."""
    aliases: tuple[Name, ...] = ()
    """Other names clients may use for it."""
    adapters: tuple[Name, ...] = ()
    """LoRA adapters its engines serve, beside those they list themselves."""
    policy: dict[str, str | int | float] = {}
    """Its own routing policy: `name` (else the router's) and parameters, over the router's own for that policy."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """What a client's model name means."""

    model: str
    """The base model: whose namespaces, tokenizer and replicas."""
    name: str
    """What the engine is asked for: the base model or an adapter."""
    lora: str | None = None
    """The adapter, which enters every block's hash."""


class ModelCard(msgspec.Struct, frozen=True):
    """One entry of an engine's `/v1/models`."""

    id: str
    parent: str | None = None


class Models:
    """Declared and learned names. Whether a model has replicas is the router's knowledge, not this one's."""

    def __init__(self, declared: Mapping[str, ModelConfig] | None = None) -> None:
        """Raises ConfigError if one name would mean two things."""
        self.declared = dict(declared or {})
        self._named: dict[str, Target] = {}
        for model, config in self.declared.items():
            for alias in config.aliases:
                self._declare(alias, Target(model=model, name=model))
            for adapter in config.adapters:
                self._declare(adapter, Target(model=model, name=adapter, lora=adapter))
        self._cards: dict[str, dict[str, dict[str, Any]]] = {}
        """By engine url, then by id: what it lists."""
        self._adapters: dict[str, str] = {}
        """Learned adapter → base model."""

    def _declare(self, name: str, target: Target) -> None:
        if name in self._named or name in self.declared:
            raise ConfigError(f"models.{target.model}", f"the name {name} is taken", "name each model differently")
        self._named[name] = target

    def config(self, model: str) -> ModelConfig:
        return self.declared.get(model, _DEFAULT)

    def resolve(self, name: str) -> Target:
        """What the name means; an unknown one is taken for a model's own."""
        target = self._named.get(name)
        if target is None:
            base = self._adapters.get(name)
            target = Target(model=name, name=name) if base is None else Target(model=base, name=name, lora=name)
        return target

    # What engines say

    def listed(self, url: str, cards: Iterable[Mapping[str, Any]]) -> None:
        """An engine's own list, replacing what it said before. Entries that are no model cards are ignored."""
        known: dict[str, dict[str, Any]] = {}
        for raw in cards:
            try:
                card = msgspec.convert(raw, ModelCard)
            except msgspec.ValidationError:
                continue
            if len(known) < MAX_CARDS:
                known[card.id] = dict(raw)
        if self._cards.get(url) != known:
            self._cards[url] = known
            self._relearn()

    def keep(self, urls: Iterable[str]) -> None:
        """Forget engines that are not among these."""
        gone = self._cards.keys() - set(urls)
        for url in gone:
            del self._cards[url]
        if gone:
            self._relearn()

    def knows(self, url: str) -> bool:
        """Whether the engine ever listed its models."""
        return url in self._cards

    def serves(self, url: str, name: str) -> bool:
        """False only where the engine listed its models and this is not among them."""
        cards = self._cards.get(url)
        return not cards or name in cards

    def cards(self, base_models: Iterable[str]) -> list[dict[str, Any]]:
        """OpenAI model objects of everything a client may name: these models, their adapters, and the aliases."""
        bases = set(base_models)
        union: dict[str, dict[str, Any]] = {}
        for cards in self._cards.values():
            for name, raw in cards.items():
                if name in bases or raw.get("parent") in bases:
                    union.setdefault(name, raw)
        for base in bases:
            union.setdefault(base, _card(base, None))
        for name, target in self._named.items():
            if target.model in bases:
                shown = _card(name, target.model if target.lora else None)
                union.setdefault(name, {**union.get(target.name, shown), "id": name})
        return [union[name] for name in sorted(union)]

    def _relearn(self) -> None:
        self._adapters = {
            name: parent
            for cards in self._cards.values()
            for name, raw in cards.items()
            if isinstance(parent := raw.get("parent"), str) and parent != name
        }


_DEFAULT = ModelConfig()


def _card(name: str, parent: str | None) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "metatrie", "root": name, "parent": parent}
