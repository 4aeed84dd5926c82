"""Finds stop strings in a text that arrives in parts.

Theory of operation. An Aho-Corasick automaton over all stop strings reads each character once, so the cost
does not depend on their number or length. Its state is the longest end of the text that some stop string
begins with: exactly what must be held back, and no more (rule K2).

Which match wins (rule K3): the parts are the unit of decision, one part per output token. After a part,
every stop string that was completed inside it is a candidate; the one that begins earliest wins, ties go to
the order in which the strings were given. A match that would begin earlier but is not complete yet does not
delay the decision: waiting for it would cost tokens that a finished answer must not have.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopScan:
    """What one part of the text released."""

    # Text that is final.
    text: str
    # The stop string that ended the text, if one did.
    matched: str | None


class StopStrings:
    """The compiled stop strings of one request; immutable, so its choices share it.

    Node 0 of the automaton is the empty string; every other node is a distinct beginning of a stop string.
    """

    __slots__ = ("children", "completed", "fallback", "num_held", "strings")

    def __init__(self, strings: Sequence[str]) -> None:
        """Compiles `strings`, in order of preference.

        Raises:
            ValueError: A stop string is empty.
        """
        if "" in strings:
            raise ValueError("stop_strings: a stop string is empty")
        self.strings = tuple(strings)
        # Next node by character.
        self.children: list[dict[str, int]] = [{}]
        # Node of the longest proper end of this node's string that is itself a node.
        self.fallback: list[int] = [0]
        # Indices of the stop strings that end where this node ends.
        self.completed: list[tuple[int, ...]] = [()]
        # Length of the longest end of this node's string that could still grow into a stop string.
        self.num_held: list[int] = [0]
        for index, string in enumerate(self.strings):
            self._add(index, string)
        self._link()

    def _add(self, index: int, string: str) -> None:
        node = 0
        for depth, char in enumerate(string, 1):
            child = self.children[node].get(char)
            if child is None:
                child = self.children[node][char] = len(self.children)
                self.children.append({})
                self.fallback.append(0)
                self.completed.append(())
                self.num_held.append(depth)
            node = child
        self.completed[node] += (index,)

    def _link(self) -> None:
        queue = deque([0])
        while queue:
            node = queue.popleft()
            for char, child in self.children[node].items():
                # Breadth first: everything shorter than the child is linked already.
                fallback = self.step(self.fallback[node], char) if node else 0
                self.fallback[child] = fallback
                self.completed[child] += self.completed[fallback]
                if not self.children[child]:
                    self.num_held[child] = self.num_held[fallback]
                queue.append(child)

    def step(self, node: int, char: str) -> int:
        """The state after reading `char` in state `node`."""
        children = self.children
        while True:
            child = children[node].get(char)
            if child is not None:
                return child
            if node == 0:
                return 0
            node = self.fallback[node]


class StopStringMatcher:
    """Watches one text for stop strings and holds back what could become one."""

    __slots__ = ("_held", "_include_stop", "_matched", "_node", "_stops")

    def __init__(self, stop_strings: Sequence[str] | StopStrings, *, include_stop: bool) -> None:
        """Starts at the beginning of a text.

        Args:
            stop_strings: In order of preference; none of them empty.
            include_stop: Whether the stop string that matched stays in the text. Nothing is held back then.

        Raises:
            ValueError: A stop string is empty.
        """
        self._stops = stop_strings if isinstance(stop_strings, StopStrings) else StopStrings(stop_strings)
        self._include_stop = include_stop
        self._node = 0
        self._held = ""
        self._matched = False

    @property
    def has_matched(self) -> bool:
        """Whether a stop string has ended the text."""
        return self._matched

    def push(self, text: str) -> StopScan:
        """Adds the next part of the text. After a match the text has ended: nothing may be added."""
        assert not self._matched, "push() after a match"
        best = self._scan(text)
        if best is None:
            return StopScan(self._release(text), None)
        begin, index = best
        matched = self._stops.strings[index]
        buffer = self._held + text
        end = begin + len(matched) if self._include_stop else begin
        self._matched, self._held = True, ""
        return StopScan(buffer[:end], matched)

    def pass_over(self, text: str) -> str:
        """Adds a part in which no stop string may end, and returns the text that is final.

        A stop string that begins here and ends in a later part still matches.
        """
        assert not self._matched, "pass_over() after a match"
        self._scan(text)
        return self._release(text)

    def finish(self) -> str:
        """Ends the text: returns what was held back."""
        held, self._held = self._held, ""
        return held

    def _scan(self, text: str) -> tuple[int, int] | None:
        """Reads `text`; returns (begin, index) of the winning match; the held text begins at 0."""
        stops = self._stops
        node = self._node
        best: tuple[int, int] | None = None
        for end, char in enumerate(text, len(self._held) + 1):
            node = stops.step(node, char)
            for index in stops.completed[node]:
                candidate = (end - len(stops.strings[index]), index)
                if best is None or candidate < best:
                    best = candidate
        self._node = node
        return best

    def _release(self, text: str) -> str:
        if self._include_stop:
            return text
        buffer = self._held + text
        split = len(buffer) - self._stops.num_held[self._node]
        self._held = buffer[split:]
        return buffer[:split]
