"""Scores an answer with 0.9 · F1 + 0.1 · format (arXiv 2508.03680): F1 of its words, and whether it is in the tags.

<answer> seth hale </answer>    for `seth hale`    0.9 · 1   + 0.1
<answer> seth moss </answer>                       0.9 · 1/2 + 0.1
it is seth hale                                    0.9 · 2/3
"""

import re
import string
from collections import Counter
from collections.abc import Iterable

F1_WEIGHT, FORMAT_WEIGHT = 0.9, 0.1
ANSWER = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>\s*$", re.DOTALL)
"""The requested form: an answer in its tags, and nothing after it."""
ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def score(output: str, golds: Iterable[str]) -> dict[str, float]:
    """`final` and its two parts. The best match of several right answers counts. Without tags, all words count."""
    found = ANSWER.search(output)
    answer = found[1] if found else output
    f1 = max(word_f1(answer, gold) for gold in golds)
    form = float(found is not None)
    return {"final": F1_WEIGHT * f1 + FORMAT_WEIGHT * form, "f1": f1, "format": form}


def word_f1(answer: str, gold: str) -> float:
    """Word F1 as in SQuAD (arXiv 1606.05250)."""
    answer_words, gold_words = normalized(answer).split(), normalized(gold).split()
    if not answer_words or not gold_words:
        return float(answer_words == gold_words)
    common = sum((Counter(answer_words) & Counter(gold_words)).values())
    return 2 * common / (len(answer_words) + len(gold_words))


def normalized(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())
