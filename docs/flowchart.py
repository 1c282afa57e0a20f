"""Draw a flowchart in Mermaid's language as an SVG, so that the site needs no script from elsewhere.

It knows what the pages use: `flowchart TD` or `LR`, `a --> b`, `a -. text .-> b`, `a[text]` with `<br>` for a new line.
"""

from __future__ import annotations

import html
import itertools
import re
from dataclasses import dataclass, field

_EDGE = re.compile(
    r"^(?P<a>\w+)(?:\[(?P<la>[^]]+)\])? *(?P<arrow>-->|-\. *(?P<text>.*?) *\.->) *(?P<b>\w+)(?:\[(?P<lb>[^]]+)\])?$"
)
_LETTER, _LINE, _PADDING = 7.4, 18, 13
_GAP, _LANE = 26, 10


@dataclass
class Box:
    """A node, or a bend (`label` is empty) of an edge that passes a layer."""

    label: str
    lane: int = 0
    # Of the middle: along the layer, and across the layers.
    along: float = 0.0
    across: float = 0.0
    # Of its layer: a bend leads straight through it, past the boxes beside it.
    thick: float = 0.0

    @property
    def lines(self) -> list[str]:
        return self.label.split("<br>") if self.label else []

    @property
    def width(self) -> float:
        return max(len(line) for line in self.lines) * _LETTER + 2 * _PADDING if self.lines else _LANE

    @property
    def height(self) -> float:
        return len(self.lines) * _LINE + _PADDING if self.lines else 0


@dataclass
class Chart:
    """Boxes by name, and edges as chains of names through all layers between their ends."""

    sideways: bool
    boxes: dict[str, Box] = field(default_factory=dict)
    edges: list[tuple[list[str], str, bool]] = field(default_factory=list)


def draw(text: str) -> str:
    """Return the SVG of a flowchart; raise ValueError for a line that is not understood."""
    chart = _read(text)
    layers = _layers(chart)
    _order(chart, layers)
    _place(chart, layers)
    return _svg(chart)


def _read(text: str) -> Chart:
    first, *lines = [line.strip() for line in text.strip().splitlines()]
    if first not in ("flowchart TD", "flowchart LR"):
        raise ValueError(f"{first!r} is not flowchart TD or flowchart LR")
    chart = Chart(sideways=first.endswith("LR"))
    for line in lines:
        match = _EDGE.match(line)
        if match is None:
            raise ValueError(f"{line!r} is no edge that docs/flowchart.py draws")
        for name, label in ((match["a"], match["la"]), (match["b"], match["lb"])):
            box = chart.boxes.setdefault(name, Box(name))
            box.label = label.strip('"') if label else box.label
        chart.edges.append(([match["a"], match["b"]], match["text"] or "", match["arrow"] != "-->"))
    return chart


def _layers(chart: Chart) -> list[list[str]]:
    """Put each box below all that lead to it, and bends into the layers that edges pass."""
    for _ in chart.boxes:
        for (a, b), _text, _dotted in chart.edges:
            chart.boxes[b].lane = max(chart.boxes[b].lane, chart.boxes[a].lane + 1)
    for number, (chain, _text, _dotted) in enumerate(chart.edges):
        a, b = chain
        passed = range(chart.boxes[a].lane + 1, chart.boxes[b].lane)
        chart.boxes.update({f"{number}.{lane}": Box("", lane) for lane in passed})
        chain[1:1] = [f"{number}.{lane}" for lane in passed]
    return [
        [name for name, box in chart.boxes.items() if box.lane == lane]
        for lane in range(max(box.lane for box in chart.boxes.values()) + 1)
    ]


def _order(chart: Chart, layers: list[list[str]]) -> None:
    """Let edges cross rarely: order each layer by the middle of its neighbours, down and up a few times."""
    steps = [step for chain, _text, _dotted in chart.edges for step in itertools.pairwise(chain)]
    for turn in range(8):
        down = turn % 2 == 0
        rank = {name: place for layer in layers for place, name in enumerate(layer)}
        for layer in layers if down else reversed(layers):
            middle = {}
            for name in layer:
                near = [rank[a] for a, b in steps if b == name] if down else [rank[b] for a, b in steps if a == name]
                middle[name] = sum(near) / len(near) if near else rank[name]
            layer.sort(key=lambda name, middle=middle: middle[name])  # type: ignore[misc]
            rank.update({name: place for place, name in enumerate(layer)})


def _place(chart: Chart, layers: list[list[str]]) -> None:
    lengths, across = [], 0.0
    for layer in layers:
        boxes = [chart.boxes[name] for name in layer]
        thick = max((box.width if chart.sideways else box.height) for box in boxes)
        along = 0.0
        for box in boxes:
            size = (box.height or _LANE) if chart.sideways else box.width
            box.along, box.across, box.thick = along + size / 2, across + thick / 2, thick
            along += size + _GAP
        lengths.append(along - _GAP)
        across += thick + _GAP * 1.4
    for layer, length in zip(layers, lengths, strict=True):
        for name in layer:
            chart.boxes[name].along += (max(lengths) - length) / 2


def _svg(chart: Chart) -> str:
    def point(box: Box, side: float) -> tuple[float, float]:
        """The middle of the box's side: -1 where edges come in, 1 where they go out."""
        size = box.thick if not box.lines else box.width if chart.sideways else box.height
        middle = box.across + side * size / 2
        return (middle, box.along) if chart.sideways else (box.along, middle)

    parts = []
    for chain, text, dotted in chart.edges:
        boxes = [chart.boxes[name] for name in chain]
        path = "M{:.0f} {:.0f}".format(*point(boxes[0], 1))
        for before, after in itertools.pairwise(boxes):
            (x, y), (to_x, to_y) = point(before, 1), point(after, -1)
            half_x, half_y = (x + to_x) / 2, (y + to_y) / 2
            bends = (half_x, y, half_x, to_y) if chart.sideways else (x, half_y, to_x, half_y)
            path += " C{:.0f} {:.0f} {:.0f} {:.0f} {:.0f} {:.0f}".format(*bends, to_x, to_y)
            path += "" if after.lines else " L{:.0f} {:.0f}".format(*point(after, 1))
        parts.append(f'<path d="{path}"{" class=dotted" if dotted else ""} marker-end="url(#arrow)"/>')
        if text:
            (x, y), (to_x, to_y) = point(boxes[0], 1), point(boxes[-1], -1)
            parts.append(f'<text x="{(x + to_x) / 2 + 8:.0f}" y="{(y + to_y) / 2 + 4:.0f}">{html.escape(text)}</text>')
    for box in chart.boxes.values():
        if not box.lines:
            continue
        x, y = (box.across, box.along) if chart.sideways else (box.along, box.across)
        left, top = x - box.width / 2, y - box.height / 2
        parts.append(f'<rect x="{left:.0f}" y="{top:.0f}" width="{box.width:.0f}" height="{box.height:.0f}" rx="6"/>')
        for number, line in enumerate(box.lines):
            base = y + (number - (len(box.lines) - 1) / 2) * _LINE + 5
            small = ' class="small"' if number else ""
            parts.append(f'<text x="{x:.0f}" y="{base:.0f}" text-anchor="middle"{small}>{html.escape(line)}</text>')
    boxes = chart.boxes.values()
    right = max((box.across if chart.sideways else box.along) + box.width / 2 for box in boxes)
    low = max((box.along if chart.sideways else box.across) + box.height / 2 for box in boxes)
    arrow = '<marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto"><path class="head" d="M0 0 8 4 0 8z"/></marker>'
    return (
        f'<svg class="flowchart" role="img" xmlns="http://www.w3.org/2000/svg" viewBox="-2 -2 {right + 4:.0f} {low + 4:.0f}" '
        f'style="max-width:{right + 4:.0f}px"><defs>{arrow}</defs>{"".join(parts)}</svg>'
    )
