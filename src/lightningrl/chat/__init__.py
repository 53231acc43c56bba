"""Messages ⇄ token ids: the prompt that the engine reads, the answer that the model samples, and the call continued."""

from lightningrl.chat.answer import Answer, AnswerStream, Piece
from lightningrl.chat.prompt import Prompt
from lightningrl.chat.template import ChatTemplate
from lightningrl.chat.tree import ConversationTree

__all__ = ["Answer", "AnswerStream", "ChatTemplate", "ConversationTree", "Piece", "Prompt"]
