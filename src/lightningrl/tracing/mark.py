"""How a span says whose it is where attempts share an exporter: by a mark that only whoever has the attempt's token can make, and that does not
give the token away to any other collector.
"""

import hashlib

MARK = "lightningrl.mark"
"""The attribute."""


def mark_of(token: str) -> str:
    return hashlib.blake2b(token.encode(), digest_size=16).hexdigest()
