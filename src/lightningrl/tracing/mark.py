"""The mark by which a span names its attempt where attempts share an exporter.

Making a mark takes the attempt's token, yet the mark reveals neither the token nor its hash to another collector.
"""

import hashlib

MARK = "lightningrl.mark"
"""The attribute of a span that holds the mark."""
BAGGAGE_KEY = "lightningrl.token"
"""The key in a request's `baggage` header whose value is the attempt's token."""


def mark_of(token_hash: str, *, attempt_id: str = "") -> str:
    """The attempt's id, if known, and a hash of the token's hash. The id finds an attempt before its first call."""
    return f"{attempt_id}/{hashlib.blake2b(token_hash.encode(), digest_size=16).hexdigest()}"


def named(mark: str) -> str:
    """The id of the attempt in a mark; "" if there is none."""
    return mark.rpartition("/")[0]
