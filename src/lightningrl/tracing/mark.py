"""How a span says whose it is where attempts share an exporter: by a mark that takes the attempt's token to make, and
that gives neither the token nor its hash away to another collector.
"""

import hashlib

MARK = "lightningrl.mark"
"""The attribute of a span."""
BAGGAGE_KEY = "lightningrl.token"
"""The key in a request's `baggage` header whose value is the attempt's token."""


def mark_of(token_hash: str, *, attempt_id: str = "") -> str:
    """The id of the attempt where it is known, so that the attempt is found before its first call; then a hash of the
    token's hash.
    """
    return f"{attempt_id}/{hashlib.blake2b(token_hash.encode(), digest_size=16).hexdigest()}"


def named(mark: str) -> str:
    """The attempt that a mark names; "" if none."""
    return mark.rpartition("/")[0]
