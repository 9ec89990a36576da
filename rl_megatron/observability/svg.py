"""A chart as an SVG file of its own, for a paper: the page's geometry, with colours and a legend in it."""

from __future__ import annotations

from html import escape

from rl_megatron.observability.charts import FRAME, Chart, styles

_COLORS = ("#2f5fde", "#d9600b", "#0d8a5b", "#b8307f", "#9333c9", "#0a8296", "#967000", "#c93434")  # the light page's
_ROW, _KEY = 14.0, 22.0


def standalone_svg(chart: Chart) -> str:
    """The text of the file. Colours and dashes are those of the page."""
    looks = styles(max((style for _, style in chart.names), default=0) + 1)
    height = FRAME["h"] + 34 + _ROW * len(chart.names)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 -18 {FRAME["w"]} {height}" '
        'font-family="sans-serif" font-size="10" fill="#333">',
        f"<title>{escape(chart.title)}</title>",
        f'<text x="{FRAME["left"]}" y="-5" font-size="11" font-weight="bold">{escape(chart.title)}</text>',
        f'<text x="{FRAME["right"]}" y="-5" text-anchor="end">{escape(chart.unit)}</text>',
    ]
    for tick in chart.y_ticks:
        out.append(f'<path d="M{FRAME["left"]} {tick.at}H{FRAME["right"]}" stroke="#ddd"/>')
        out.append(f'<text x="{FRAME["left"] - 5}" y="{tick.at + 3}" text-anchor="end">{escape(tick.text)}</text>')
    at_x = (
        f'<text x="{t.at}" y="{FRAME["bottom"] + 14}" text-anchor="middle">{escape(t.text)}</text>'
        for t in chart.x_ticks
    )
    out.extend(at_x)
    for mark in chart.marks:
        color, on, off = looks[mark.style]
        paint = _COLORS[color]
        if mark.kind == "line":
            dash = f' stroke-dasharray="{on} {off}"' if off else ""
            out.append(f'<path d="{mark.path}" fill="none" stroke="{paint}" stroke-width="1.6"{dash}/>')
        else:
            opacity = ' fill-opacity="0.15"' if mark.kind == "band" else ""
            out.append(f'<path d="{mark.path}" fill="{paint}"{opacity}/>')
    for row, (name, style) in enumerate(chart.names):
        color, on, off = looks[style]
        y, dash = FRAME["h"] + 8 + _ROW * row, f' stroke-dasharray="{on} {off}"' if off else ""
        out.append(f'<path d="M{FRAME["left"]} {y}h{_KEY}" stroke="{_COLORS[color]}" stroke-width="1.6"{dash}/>')
        out.append(f'<text x="{FRAME["left"] + _KEY + 5}" y="{y + 3}">{escape(name)}</text>')
    return "\n".join([*out, "</svg>", ""])
