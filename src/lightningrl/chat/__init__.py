"""Messages ⇄ token ids: what the engine is to read, what the model has said, and which earlier call a conversation
continues.
"""

from lightningrl.chat.answer import Answer, AnswerStream, Piece
from lightningrl.chat.prompt import Prompt
from lightningrl.chat.template import ChatTemplate
from lightningrl.chat.tree import ConversationTree

__all__ = ["Answer", "AnswerStream", "ChatTemplate", "ConversationTree", "Piece", "Prompt"]
