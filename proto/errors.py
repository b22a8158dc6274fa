"""Every error metatrie raises on purpose. The branch says whose fault it was.

MetatrieError
├── EngineError            an engine sent something it should not have
│   ├── MalformedBatch     a payload that is no event batch at all
│   └── UnhashableBlock    a block whose published inputs do not determine a hash
├── CallerError            a request to one of our servers was wrong (4xx)
│   ├── InvalidField       a field is missing, of the wrong type or out of range (400)
│   ├── Unauthorized       no or wrong credentials (401)
│   ├── Forbidden          the caller may not use this field (403)
│   ├── NotFound           unknown model, replica or reservation (404)
│   ├── Conflict           the name is taken (409)
│   ├── BodyTooLarge       a body over the configured limit (413)
│   ├── TooManyRequests    a bound on what is outstanding, or the caller's own limit (429, retry later)
│   └── NoReplica          nothing live can serve this (503, the caller may retry)
├── StoreError             the index store let us down
│   ├── StoreUnavailable   not reachable, timed out or failing over
│   └── StoreRefused       reachable, but unfit or full (eviction policy, out of memory)
├── Superseded             somebody else owns this replica's registration now
├── BadCheckpoint          a consumer's checkpoint is damaged, or was written for something else
├── BadRecording           a file given as a recording is none, or one we cannot read
└── ConfigError            a setting is wrong; the text names the setting and the remedy
"""

from __future__ import annotations


class MetatrieError(Exception):
    """Base of every error raised on purpose."""


class EngineError(MetatrieError):
    """An engine sent something it should not have."""


class MalformedBatch(EngineError):
    """A payload that is no event batch at all. `cause` is a short, stable label for metrics."""

    def __init__(self, cause: str) -> None:
        super().__init__(f"malformed event batch: {cause}")
        self.cause = cause


class UnhashableBlock(EngineError):
    """A block whose published inputs do not determine its canonical hash. `cause` is a metric label."""

    def __init__(self, cause: str) -> None:
        super().__init__(f"block cannot be hashed from what the wire shows: {cause}")
        self.cause = cause


class CallerError(MetatrieError):
    """A request was wrong. `field` names the offending field, `remedy` says what to send instead."""

    status = 400
    title = "Bad request"

    def __init__(self, detail: str, *, field: str | None = None, remedy: str | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        self.field = field
        self.remedy = remedy


class InvalidField(CallerError):
    status = 400
    title = "Invalid field"


class Unauthorized(CallerError):
    status = 401
    title = "Unauthorized"


class Forbidden(CallerError):
    status = 403
    title = "Forbidden"


class NotFound(CallerError):
    status = 404
    title = "Not found"


class Conflict(CallerError):
    status = 409
    title = "Conflict"


class BodyTooLarge(CallerError):
    status = 413
    title = "Body too large"


class TooManyRequests(CallerError):
    """`retry_after_s`: when it may be worth trying again."""

    status = 429
    title = "Too many requests"

    def __init__(self, detail: str, *, field: str | None = None, remedy: str | None = None, retry_after_s: int = 1):
        super().__init__(detail, field=field, remedy=remedy)
        self.retry_after_s = retry_after_s


class NoReplica(CallerError):
    status = 503
    title = "No replica available"


class StoreError(MetatrieError):
    """The index store let us down."""


class StoreUnavailable(StoreError):
    """The store is not reachable, timed out, or is failing over. Retrying later can help."""


class StoreRefused(StoreError):
    """The store answered but is unfit or full. Retrying helps only after the remedy in the text."""


class Superseded(MetatrieError):
    """Somebody else owns this replica's registration now; the loser stands by and must not write.

    `retry_s`: what is left of the other's lease, where that is what stands in the way.
    """

    def __init__(self, text: str, *, retry_s: float | None = None) -> None:
        super().__init__(text)
        self.retry_s = retry_s


class BadCheckpoint(MetatrieError):
    """A consumer's checkpoint is damaged, or was written for something else. Reads as `checkpoint <text>`."""


class BadRecording(MetatrieError):
    """A file given as a recording is none, or one this version cannot read. The text names the file."""


class ConfigError(MetatrieError):
    """A setting is wrong. `setting` is its name as the user wrote it."""

    def __init__(self, setting: str, problem: str, remedy: str) -> None:
        super().__init__(f"{setting}: {problem}; {remedy}")
        self.setting = setting
