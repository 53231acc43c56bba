"""Why was a prompt forked, or bridged only partly? All values of `Call.capture_reason` for such prompts.

docs/token-exact.md explains each.
"""

TOOLS_CHANGED = "the tools have changed"
HISTORY_DROPPED = "earlier messages have been dropped"
HISTORY_INSERTED = "messages have been inserted into the history"
HISTORY_REWRITTEN = "the history before the answer has changed"
ANSWER_REWRITTEN = "the answer in the history is not the one that was given"
ANSWER_EXTENDED = "text has been put behind an answer whose turn had ended"

NO_TURN_END = "the template has no token that ends a turn"
TEXT_BEFORE_END = "the template puts text between an answer and the end of its turn"
END_JOINED = "the tokenizer joins the end of the turn with what is around it"
FOREIGN_END = "the answer ended with another token than the template's"
SUFFIX_DEPENDS = "what the template renders after the answer depends on the answer"

TEMPLATE_POLICY = "the template renders the history in other tokens than were sampled"

RAW_END_LEFT_OUT = "the raw prompt leaves out the token that ended the answer"

ALL = (
    TOOLS_CHANGED,
    HISTORY_DROPPED,
    HISTORY_INSERTED,
    HISTORY_REWRITTEN,
    ANSWER_REWRITTEN,
    ANSWER_EXTENDED,
    NO_TURN_END,
    TEXT_BEFORE_END,
    END_JOINED,
    FOREIGN_END,
    SUFFIX_DEPENDS,
    TEMPLATE_POLICY,
    RAW_END_LEFT_OUT,
)
