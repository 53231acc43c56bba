"""How a span says whose it is where attempts share an exporter: by a mark that only whoever has the attempt's token can make, and that does not
give the token away to any other collector.
"""

import hashlib

MARK = "lightningrl.mark"
"""The attribute."""


def mark_of(token: str, *, attempt_id: str = "") -> str:
    """The id of the attempt where it is known, so that the attempt is found before its first call; then what only the token's holder can make."""
    return f"{attempt_id}/{hashlib.blake2b(token.encode(), digest_size=16).hexdigest()}"


def named(mark: str) -> str:
    """The attempt that a mark names; "" if none."""
    return mark.rpartition("/")[0]
