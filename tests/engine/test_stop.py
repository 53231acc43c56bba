"""`StopFinder` finds a stop string at the same token as decoding the whole text after each token."""

import random

from lightningrl.engine.stop import StopFinder
from lightningrl.models.tiny import build_tokenizer

TEXT = "SELECT name FROM city; -- 'Zürich' 漢字\n\nSELECT 'a b' </answer> ```sql\n<|im_end|>"


def test_the_shortcut_agrees_with_decoding_everything() -> None:
    tokenizer = build_tokenizer([TEXT] * 3, vocab_size=400)
    rng = random.Random(0)
    finder = StopFinder(tokenizer.decode)
    hits = 0
    for _ in range(300):
        ids = rng.choice([tokenizer.encode(TEXT), [rng.randrange(len(tokenizer)) for _ in range(40)]])
        text = tokenizer.decode(ids)
        start = rng.randrange(len(text) - 1)
        stops = [text[start : start + rng.randint(1, 6)], "never there"]
        expected = next(n for n in range(1, len(ids) + 1) if stops[0] in tokenizer.decode(ids[:n]))
        found = next(n for n in range(1, len(ids) + 1) if finder.found(ids[:n], stops))
        assert found == expected, stops
        hits += 1 < found < len(ids)
    assert hits > 100
