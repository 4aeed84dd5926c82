"""A bar chart as SVG text: one picture needs no plotting library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

_COLOURS = ("#2563eb", "#94a3b8", "#f59e0b", "#10b981", "#a855f7", "#ef4444")
_BAR, _GAP, _HEIGHT = 26, 40, 260
_LEFT, _TOP, _BOTTOM = 70, 50, 60
_LEGEND = 18


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure with its spread; none is negative."""

    label: str
    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class BarGroup:
    """Bars that are compared."""

    label: str
    bars: tuple[Bar, ...]


def axis_top(largest: float) -> float:
    """The smallest of 1, 2, 2.5, 5 or 10 times a power of ten that reaches `largest`; 1 for nothing."""
    if largest <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(largest))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= largest)


def bar_chart(title: str, groups: Sequence[BarGroup]) -> str:
    """The SVG. Labels may hold anything; equal labels have equal colours."""
    labels = list(dict.fromkeys(bar.label for group in groups for bar in group.bars))
    top = axis_top(max((bar.high for group in groups for bar in group.bars), default=0.0))
    width = _LEFT + sum(len(group.bars) * _BAR + _GAP for group in groups) + _GAP
    width = max(width, _LEFT + 8 * max((len(label) for label in (title, *labels)), default=0))
    height = _TOP + _HEIGHT + _BOTTOM + _LEGEND * len(labels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(width / 2, 24, title, anchor="middle", size=15),
        *_axis(top, width),
    ]
    x = _LEFT + _GAP / 2
    for group in groups:
        middle = x + len(group.bars) * _BAR / 2
        parts.append(_text(middle, _TOP + _HEIGHT + 18, group.label, anchor="middle"))
        for bar in group.bars:
            parts += _bar(x, bar, top, _COLOURS[labels.index(bar.label) % len(_COLOURS)])
            x += _BAR
        x += _GAP
    for index, label in enumerate(labels):
        y = _TOP + _HEIGHT + _BOTTOM - 18 + index * _LEGEND
        colour = _COLOURS[index % len(_COLOURS)]
        parts.append(f'<rect x="{_LEFT}" y="{y}" width="12" height="12" fill="{colour}"/>')
        parts.append(_text(_LEFT + 20, y + 11, label))
    return "\n".join([*parts, "</svg>", ""])


def _y(value: float, top: float) -> float:
    return _TOP + _HEIGHT * (1 - value / top)


def _axis(top: float, width: float) -> list[str]:
    parts: list[str] = []
    for step in range(6):
        value = top * step / 5
        y = _y(value, top)
        parts.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{width - 10}" y2="{y:.1f}" stroke="#e2e8f0"/>')
        parts.append(_text(_LEFT - 8, y + 4, f"{value:,.10g}", anchor="end"))
    return parts


def _bar(x: float, bar: Bar, top: float, colour: str) -> list[str]:
    y = _y(bar.value, top)
    middle = x + _BAR / 2 - 2
    return [
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{_BAR - 4}" height="{_TOP + _HEIGHT - y:.1f}" fill="{colour}">'
        f"<title>{escape(bar.label)}: {bar.value:,.1f} ({bar.low:,.1f} to {bar.high:,.1f})</title></rect>",
        f'<line x1="{middle:.1f}" y1="{_y(bar.low, top):.1f}" x2="{middle:.1f}" y2="{_y(bar.high, top):.1f}" '
        f'stroke="black"/>',
    ]


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'
