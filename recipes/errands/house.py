"""The house and its tools. Every attempt gets one of its own.

Tools answer with a line of text. An impossible action returns `error: …` and changes nothing. A parcel for the wrong
person is lost, and the tool says so.
"""

from collections.abc import Mapping, Sequence
from typing import Any

ROOMS = ("attic", "cellar", "garage", "kitchen", "pantry", "study")
THINGS = ("book", "clock", "cup", "lamp", "rope", "vase")
COLOURS = ("blue", "green", "red", "white")
PEOPLE = ("anna", "ben", "cleo", "dan")

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]},
        },
    }
    for name, argument in (("go", "room"), ("take", "thing"), ("send", "person"))
]


class House:
    """Six rooms, a walker who can hold one thing, and the parcels sent so far."""

    def __init__(self, rooms: Mapping[str, Sequence[str]], wanted: Sequence[Sequence[str]]) -> None:
        """`wanted`: [person, thing] of each errand."""
        self._rooms = {room: list(rooms.get(room, ())) for room in ROOMS}
        self._room = ""
        self._hands = ""
        self._wanted = [list(wish) for wish in wanted]
        self.sent: list[list[str]] = []
        """[person, thing] in the order of sending."""

    def call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """Returns the tool's answer."""
        match tool, dict(arguments):
            case "go", {"room": str(room)}:
                return self._go(room)
            case "take", {"thing": str(thing)}:
                return self._take(thing)
            case "send", {"person": str(person)}:
                return self._send(person)
        return "error: there is no such tool"

    def _go(self, room: str) -> str:
        if room not in self._rooms:
            return f"error: there is no {room}"
        if room == self._room:
            return f"error: you are in the {room}"
        self._room = room
        return "you see " + (", ".join(f'"{thing}"' for thing in self._rooms[room]) or "nothing")

    def _take(self, thing: str) -> str:
        if self._hands:
            return f'error: you hold "{self._hands}"'
        if thing not in self._rooms.get(self._room, ()):
            return f'error: there is no "{thing}" here'
        self._rooms[self._room].remove(thing)
        self._hands = thing
        return f'you hold "{thing}"'

    def _send(self, person: str) -> str:
        if person not in PEOPLE:
            return f"error: there is no {person}"
        if not self._hands:
            return "error: you hold nothing"
        parcel, self._hands = [person, self._hands], ""
        if parcel not in self._wanted:
            return f"error: {person} did not ask for it"
        self.sent.append(parcel)
        return "sent"
