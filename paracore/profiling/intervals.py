"""Sets of moments, as sorted disjoint intervals [begin, end) of integers: nanoseconds here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

Interval: TypeAlias = tuple[int, int]
Intervals: TypeAlias = Sequence[Interval]
"""Sorted, disjoint, none of them empty or touching the next."""


def union(*sets: Iterable[Interval]) -> list[Interval]:
    """Return the moments in any of the sets, which need be neither sorted nor disjoint."""
    found: list[Interval] = []
    for begin, end in sorted(interval for each in sets for interval in each):
        if begin >= end:
            continue
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def intersection(a: Intervals, b: Intervals) -> list[Interval]:
    """Return the moments in both sets."""
    found: list[Interval] = []
    i = j = 0
    while i < len(a) and j < len(b):
        begin, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if begin < end:
            found.append((begin, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def difference(a: Intervals, b: Intervals) -> list[Interval]:
    """Return the moments of a that are not in b."""
    if not a:
        return []
    first, last = a[0][0], a[-1][1]
    outside: list[Interval] = []
    at = first
    for begin, end in b:
        if begin > at:
            outside.append((at, min(begin, last)))
        at = max(at, end)
        if at >= last:
            break
    if at < last:
        outside.append((at, last))
    return intersection(a, [interval for interval in outside if interval[0] < interval[1]])


def length(intervals: Intervals) -> int:
    """Return how many moments there are."""
    return sum(end - begin for begin, end in intervals)
