"""From messages to token ids, as an engine does it: what the simulated engine and the router must do alike.

Strategy. Three steps, each a function of its own: `conversation` brings OpenAI messages into the form chat
templates are written against, a tokenizer's `apply_chat_template` renders them, `encode` turns the text into ids.
The rules of the first step are vLLM's (`parse_chat_messages` and `ChatCompletionToolsParam` of its OpenAI server),
those of the second are the Transformers library's. One token that differs changes every later block hash, so what
cannot be done exactly is refused, never approximated.

Splitting. A Hugging Face tokenizer cuts the text at its added tokens before anything else looks at it, and
normalises, pre-tokenises and encodes what lies between piece by piece. So the ids of a text are the ids of its
pieces, one after the other, if every piece but the first *begins with* an added token that was found the same way
(leftmost, then longest) and whose match does not depend on its neighbours. `split` gives exactly these pieces: it
looks for all added tokens, and cuts only at those with no `lstrip`, `rstrip`, `single_word` or `normalized` flag.
That each begins with its token matters: a pre-tokenizer may treat the beginning of a text differently, and so it is
never text.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence, Set
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NoReturn, Protocol

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import msgspec

from .errors import ConfigError, InvalidField

Message = Mapping[str, Any]
ContentFormat = Literal["string", "openai"]
"""What a template expects as a message's content: one text, or a list of typed parts."""

_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal"})
_TEMPLATE_ARGUMENTS = frozenset({"messages", "tools", "documents", "add_generation_prompt", "chat_template"})


class TextTokenizer(Protocol):
    """Text of a prompt to token ids. Safe to use from several threads."""

    content_format: ContentFormat

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids; special tokens written out in the text count as such. add_special_tokens: BOS and the like.

        Raises InvalidField for text that is no Unicode (lone surrogates).
        """
        ...

    def encode_pieces(self, pieces: Sequence[str]) -> list[list[int]]:
        """The ids of each piece by itself, without BOS and the like. Raises as `encode`."""
        ...

    def frame(self) -> tuple[list[int], list[int]] | None:
        """What `add_special_tokens` puts before and after any text; None if that depends on the text."""
        ...

    def split(self, text: str) -> list[str]:
        """Pieces of the text whose ids, one after the other, are the ids of the whole. Joined they are the text."""
        ...

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt text of a conversation. Raises InvalidField where the template refuses it."""
        ...


def load_text_tokenizer(name_or_path: str) -> TextTokenizer:
    """`byte` for the built-in one, else a directory with `tokenizer.json`. Raises ConfigError."""
    return ByteText() if name_or_path == "byte" else HFText(name_or_path)


# Conversations


class ChatPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """What of a chat request decides its prompt."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Mapping[str, Any] = {}


def render(tokenizer: TextTokenizer, chat: ChatPrompt) -> str:
    """The text of a chat prompt. Raises InvalidField for messages the engine refuses, and for media parts."""
    messages = conversation(chat.messages, tokenizer.content_format)
    if chat.continue_final_message and chat.add_generation_prompt:
        raise InvalidField("cannot be combined with add_generation_prompt", field="continue_final_message")
    kwargs = {k: v for k, v in chat.chat_template_kwargs.items() if k not in _TEMPLATE_ARGUMENTS}
    text = tokenizer.apply_chat_template(
        messages,
        chat.add_generation_prompt,
        None if chat.tools is None else tool_dicts(chat.tools),
        **kwargs,
        documents=chat.documents,
    )
    return _cut_after(text, messages[-1]["content"]) if chat.continue_final_message else text


def conversation(messages: Sequence[Message], content_format: ContentFormat) -> list[dict[str, Any]]:
    """Messages as vLLM hands them to a chat template. Raises InvalidField for what it refuses, and for media."""
    found: list[dict[str, Any]] = []
    for message in messages:
        role = message.get("role")
        if not isinstance(role, str):
            raise InvalidField("every message needs a role", field="messages")
        one: dict[str, Any] = {"role": role, "content": _content(message.get("content"), content_format)}
        if role == "assistant":
            calls = message.get("tool_calls")
            if calls is not None:
                calls = [_tool_call(call) for call in calls] if isinstance(calls, list) else calls
                if calls:
                    one["tool_calls"] = calls
            reasoning = message.get("reasoning", message.get("reasoning_content"))
            if reasoning is not None:
                one["reasoning"] = one["reasoning_content"] = reasoning
        elif role == "tool" and "tool_call_id" in message:
            one["tool_call_id"] = message["tool_call_id"]
        elif role == "developer":
            one["tools"] = message.get("tools")
        if isinstance(message.get("name"), str):
            one["name"] = message["name"]
        found.append(one)
    return found


def tool_dicts(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tools as vLLM hands them to a chat template: declared fields first and in order, absent ones null."""
    return [_tool(tool) for tool in tools]


def media_at(messages: Sequence[Message]) -> int | None:
    """Index of the first message with a part that is not text; None if there is none."""
    for index, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list) and any(_is_media(part) for part in content):
            return index
    return None


def _is_media(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") not in (*_TEXT_PARTS, "thinking")


def _content(content: object, content_format: ContentFormat) -> str | list[dict[str, Any]]:
    if content is None:
        texts = []
    elif isinstance(content, str):
        texts = [content]
    elif isinstance(content, list):
        texts = [_part(part) for part in content]
    else:
        raise InvalidField("content must be text or a list of parts", field="messages")
    return [{"type": "text", "text": text} for text in texts] if content_format == "openai" else "\n".join(texts)


def _part(part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") in _TEXT_PARTS:
        text = part.get("refusal" if part["type"] == "refusal" else "text")
        if isinstance(text, str):
            return text
    raise InvalidField(
        "only text content can be tokenised here", field="messages", remedy="send strings or text parts"
    )


def _tool_call(call: object) -> Any:
    """Arguments become a document; templates are written against that, and clients send them as text."""
    if not isinstance(call, dict) or not isinstance(function := call.get("function"), dict):
        return call
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise InvalidField("the arguments of a tool call are no JSON", field="messages") from None
    return {**call, "function": {**function, "arguments": arguments}}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise InvalidField("every tool needs a function", field="tools")
    declared = {"name": function.get("name"), "description": None, "parameters": None}
    return {"type": "function", "function": {**declared, **function}} | {
        name: value for name, value in tool.items() if name not in ("type", "function")
    }


def _cut_after(text: str, final: str | list[dict[str, Any]]) -> str:
    """The prompt up to the end of the final message's content, so that generation continues it."""
    if isinstance(final, list):
        final = final[-1]["text"] if final else ""
    at = text.rfind(final.strip())
    if at < 0:
        raise InvalidField("the chat template changes the final message", field="continue_final_message")
    whole = final.lstrip()
    return text[: at + len(whole)] if text.startswith(whole, at) else text[: at + len(final.strip())]


# Tokenizers


class ByteText:
    """One token per UTF-8 byte, and ChatML role markers. Nothing to download."""

    SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    content_format: ContentFormat = "string"

    def __init__(self) -> None:
        self.vocab_size = 256 + len(self.SPECIAL)
        self._ids = {text: 256 + i for i, text in enumerate(self.SPECIAL)}
        self._split = re.compile("(" + "|".join(map(re.escape, self.SPECIAL)) + ")").split

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = []
        for i, part in enumerate(self._split(text)):
            if i % 2:
                ids.append(self._ids[part])
            else:
                ids += part.encode("utf-8", "replace")
        return ids

    def encode_pieces(self, pieces: Sequence[str]) -> list[list[int]]:
        return [self.encode(piece) for piece in pieces]

    def frame(self) -> tuple[list[int], list[int]]:
        return [], []

    def split(self, text: str) -> list[str]:
        first, *rest = self._split(text)
        pieces = [first] if first else []
        return pieces + [marker + after for marker, after in zip(rest[::2], rest[1::2], strict=True)]

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        turns = [f"<|im_start|>{m['role']}\n{m.get('content') or ''}{_calls(m)}<|im_end|>\n" for m in messages]
        if tools:
            turns.insert(0, f"<|im_start|>tools\n{json.dumps(list(tools), sort_keys=True)}<|im_end|>\n")
        if add_generation_prompt:
            turns.append("<|im_start|>assistant\n")
        return "".join(turns)


def _calls(message: Message) -> str:
    calls = message.get("tool_calls")
    return f"\n{json.dumps(calls, sort_keys=True)}" if calls else ""


class HFText:
    """A Hugging Face fast tokenizer from a local directory, with its chat template."""

    def __init__(self, path: str, *, content_format: ContentFormat | None = None) -> None:
        """path: a directory holding tokenizer.json, and tokenizer_config.json for special tokens and the template.
        content_format: None finds out from the template. Raises ConfigError."""
        try:
            from tokenizers import Tokenizer as FastTokenizer
        except ImportError:
            raise ConfigError(
                "tokenizer", "the tokenizers package is missing", "install metatrie[hf], or use the tokenizer `byte`"
            ) from None
        directory = Path(path)
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise ConfigError("tokenizer", f"no tokenizer.json in {path}", "name such a directory, or `byte`")
        self._tokenizer = FastTokenizer.from_file(str(file))
        self._tokenizer.no_truncation()  # a file may carry what somebody once trained with; servers set their own
        self._tokenizer.no_padding()
        config_file = directory / "tokenizer_config.json"
        config = json.loads(config_file.read_text("utf-8")) if config_file.is_file() else {}
        self._special_texts = _special_texts(config)
        self._templates, expected = _templates(directory, config)
        self.content_format: ContentFormat = content_format or expected
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = frozenset(i for i, token in added.items() if token.special)
        # Tokens with `normalized` are looked for later, inside what these leave, and so cut nothing here.
        found = {token.content: token for token in added.values() if token.content and not token.normalized}
        # Alternatives are tried in order: the longest first makes the match leftmost-longest, as the tokenizer's is.
        longest_first = sorted(found, key=len, reverse=True)
        self._find = re.compile("|".join(map(re.escape, longest_first))).finditer if found else None
        self._cuts = {
            text
            for text, token in found.items()
            if not (token.lstrip or token.rstrip or token.single_word or text[0].isspace())
        }
        if getattr(self._tokenizer.model, "dropout", None):
            self._cuts = set()  # the same piece encodes differently each time
        self._frame = self._find_frame()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeEncodeError):
            raise _no_unicode() from None
        return ids

    def encode_pieces(self, pieces: Sequence[str]) -> list[list[int]]:
        try:
            return [e.ids for e in self._tokenizer.encode_batch_fast(list(pieces), add_special_tokens=False)]
        except (TypeError, UnicodeEncodeError):
            raise _no_unicode() from None

    def frame(self) -> tuple[list[int], list[int]] | None:
        return self._frame

    def split(self, text: str) -> list[str]:
        if self._find is None or not self._cuts:
            return [text] if text else []
        cuts = self._cuts
        starts = [0, *(m.start() for m in self._find(text) if m.start() and m[0] in cuts), len(text)]
        return [text[start:end] for start, end in pairwise(starts) if end > start]

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        template = self._templates.get("default")
        if tools is not None:
            template = self._templates.get("tool_use", template)
        if template is None:
            raise InvalidField(
                "this tokenizer has no chat template", field="messages", remedy="send a prompt to /v1/completions"
            )
        try:
            return template.render(
                **{
                    **self._special_texts,
                    "documents": None,
                    **kwargs,
                    "messages": messages,
                    "tools": tools,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
            raise InvalidField(
                f"the chat template refuses these messages ({type(error).__name__})", field="messages"
            ) from None

    def _find_frame(self) -> tuple[list[int], list[int]] | None:
        """Post-processors put fixed ids around a single text; two texts of different ids show which."""
        frames = []
        for probe in ("a", "Zq 9"):
            bare = self.encode(probe, add_special_tokens=False)
            framed = self.encode(probe)
            at = next((i for i in range(len(framed)) if framed[i : i + len(bare)] == bare), None)
            if at is None or not bare:
                return None
            frames.append((framed[:at], framed[at + len(bare) :]))
        return frames[0] if frames[0] == frames[1] else None


def _no_unicode() -> InvalidField:
    return InvalidField("the text holds a lone surrogate", field="prompt", remedy="send Unicode text")


# Templates


def _special_texts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Special tokens by the names templates use."""

    def text(value: Any) -> str:
        return value if isinstance(value, str) else str(value.get("content", ""))

    named = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
    texts: dict[str, Any] = {name: text(config[name]) for name in named if config.get(name) is not None}
    if isinstance(more := config.get("additional_special_tokens"), list):
        texts["additional_special_tokens"] = [text(value) for value in more]
    return texts


def _templates(directory: Path, config: Mapping[str, Any]) -> tuple[dict[str, jinja2.Template], ContentFormat]:
    """By name, of which `default` and `tool_use` are ever asked for; and what the default expects as content."""
    source = config.get("chat_template")
    named: list[dict[str, Any]] = source if isinstance(source, list) else [{"name": "default", "template": source}]
    sources: dict[str, str] = {e["name"]: e["template"] for e in named if e.get("name") and e.get("template")}
    file = directory / "chat_template.jinja"
    if file.is_file():
        sources["default"] = file.read_text("utf-8")
    environment = _environment()
    try:
        templates = {name: environment.from_string(text) for name, text in sources.items()}
        parts = "default" in sources and _iterates_content(environment.parse(sources["default"]))
    except jinja2.TemplateError as error:
        raise ConfigError("tokenizer", f"its chat template is broken ({error})", "repair the template") from None
    return templates, "openai" if parts else "string"


def _iterates_content(template: jinja2.nodes.Template) -> bool:
    """Whether the template loops over a message's content, as those do that expect a list of parts (vLLM's rule)."""
    aliases = {
        assign.target.name
        for assign in template.find_all(jinja2.nodes.Assign)
        if isinstance(assign.target, jinja2.nodes.Name) and _is_content(assign.node, frozenset())
    }
    return any(_is_content(loop.iter, aliases) for loop in template.find_all(jinja2.nodes.For))


def _is_content(node: jinja2.nodes.Node | None, aliases: Set[str]) -> bool:
    while isinstance(node, jinja2.nodes.Filter | jinja2.nodes.Test):
        node = node.node
    match node:
        case jinja2.nodes.Getattr(attr="content"):
            return True
        case jinja2.nodes.Getitem(arg=jinja2.nodes.Const(value="content")):
            return True
        case jinja2.nodes.Name(name=name):
            return name in aliases
    return False


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}`: marks what an assistant said, for training; nothing else."""

    tags = {"generation"}  # noqa: RUF012 - declared so by the base class

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    """As the Transformers library sets it up, with the helpers chat templates are written against."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda fmt: datetime.datetime.now().astimezone().strftime(fmt)
    return environment
