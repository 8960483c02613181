"""A radix tree over token ids: every distinct prefix of what was put in is stored once.

Edges carry runs of ids. A leaf grows in place, so a talk of 400 turns is one edge and is matched by one comparison of
arrays; an edge is split only where sequences part. Time is linear in the tokens put in, memory in the distinct ones.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from outrider.types import IntArray


class Node:
    """An edge and the node at its end. `marks` are the places on it where a sequence ends: (offset, its number)."""

    __slots__ = ("children", "ids", "length", "marks", "parent", "start")

    def __init__(self, ids: IntArray, start: int, parent: Node | None) -> None:
        self.ids = ids
        """Only the first `length` are in use: a growing leaf reserves room."""
        self.length = len(ids)
        self.start = start
        """Tokens above this edge."""
        self.parent = parent
        self.children: dict[int, Node] = {}
        self.marks: list[tuple[int, int]] = []

    def grow(self, ids: IntArray) -> None:
        need = self.length + len(ids)
        if need > len(self.ids):
            roomier = np.empty(max(need, 2 * len(self.ids)), dtype=np.int32)
            roomier[: self.length] = self.ids[: self.length]
            self.ids = roomier
        self.ids[self.length : need] = ids
        self.length = need

    def split(self, offset: int) -> None:
        """Cut the edge in two; this node keeps the upper part."""
        lower = Node(self.ids[offset : self.length].copy(), self.start + offset, self)
        lower.children = self.children
        for child in lower.children.values():
            child.parent = lower
        lower.marks = [(place - offset, number) for place, number in self.marks if place > offset]
        self.marks = [(place, number) for place, number in self.marks if place <= offset]
        self.children = {int(lower.ids[0]): lower}
        self.ids = self.ids[:offset].copy()
        self.length = offset

    def path_ids(self, end: int) -> IntArray:
        """The first `end` tokens from the root to here, shape (end,)."""
        ids = np.empty(end, dtype=np.int32)
        node: Node | None = self
        while node is not None:
            used = min(node.length, end - node.start)
            ids[node.start : node.start + used] = node.ids[:used]
            node = node.parent
        return ids


class Place(NamedTuple):
    """A position in the tree: so many tokens down the edge of `node`."""

    node: Node
    offset: int


class Trie:
    def __init__(self) -> None:
        self.root = Node(np.empty(0, dtype=np.int32), 0, None)
        self.tokens = 0
        """Distinct tokens held."""

    def put(self, ids: IntArray, below: Place | None = None) -> Place:
        """Follow `ids` from the root, or from `below`, and add what is not there yet. Returns where they end."""
        node, offset = below or (self.root, 0)
        done = 0
        while done < len(ids):
            rest = ids[done:]
            if offset == node.length:
                child = node.children.get(int(rest[0]))
                if child is None:
                    return self._add(node, rest)
                node, offset = child, 0
            same = _common(node.ids[offset : node.length], rest)
            done += same
            offset += same
            if done < len(ids) and offset < node.length:
                node.split(offset)
        return Place(node, offset)

    def _add(self, node: Node, ids: IntArray) -> Place:
        """New tokens at the end of `node`, which has no child that begins like them."""
        self.tokens += len(ids)
        if not node.children:
            node.grow(ids)
            return Place(node, node.length)
        child = Node(ids.astype(np.int32), node.start + node.length, node)
        node.children[int(ids[0])] = child
        return Place(child, child.length)

    def trim(self) -> None:
        """Give back the room that growing leaves have reserved."""
        waiting = [self.root]
        while waiting:
            node = waiting.pop()
            waiting += node.children.values()
            if len(node.ids) > node.length:
                node.ids = node.ids[: node.length].copy()


def _common(one: IntArray, other: IntArray) -> int:
    """Length of the common prefix."""
    shorter = min(len(one), len(other))
    if not shorter:
        return 0
    differ = one[:shorter] != other[:shorter]
    first = int(differ.argmax())
    return first if differ[first] else shorter
