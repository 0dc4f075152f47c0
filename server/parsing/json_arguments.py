"""Base of formats that write the name of a call by itself, and then its arguments as one JSON object."""

from server.parsing.json_repair import JsonRepair
from server.parsing.parser import Marker, ToolParser, Tools


class JsonArgumentsParser(ToolParser):
    """States from the beginning of the arguments to the end of the call; a format continues after it."""

    def __init__(self, tools: Tools, marker: Marker) -> None:
        super().__init__(tools, marker)
        self._writer: JsonRepair | None = None  # of the open call, once its arguments have begun

    def _begin_arguments(self, writer: JsonRepair) -> None:
        """Let `writer` read the arguments of the open call, up to the end of the JSON value."""
        self._writer = writer
        self._state = self._in_arguments

    def _in_arguments(self) -> bool:
        assert self._writer is not None
        part, self._at = self._writer.feed(self._text, self._at)
        self.arguments(part)
        if self._writer.is_done:
            self._end_call("")
        return True

    def _end_call(self, arguments: str) -> None:
        """Complete the open call with the rest of its arguments."""
        self.arguments(arguments)
        self._writer = None
        self.end()
        self._state = self._after_call

    def _after_call(self) -> bool:
        """Read what follows a call: content, unless the format has markers there."""
        self._state = self._content
        return True

    def _close_call(self) -> None:
        assert self._writer is not None
        self._end_call(self._writer.close())
