"""The report as one HTML page that needs nothing beside it."""

import base64
import math
from collections.abc import Iterable, Sequence
from html import escape
from statistics import median

from lightning_amp.callbacks.report_figures import course_picture, scales_picture
from lightning_amp.callbacks.report_record import Record
from lightning_amp.outcomes import Outcome

_NAMES_SHOWN = 6
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_STYLE = """
:root{color-scheme:light}
body{font:15px/1.5 system-ui,-apple-system,'Segoe UI',sans-serif;max-width:62rem;margin:2.5rem auto;padding:0 1.25rem;
color:#22262a;background:#fff}
h1{font-size:1.55rem;margin:0 0 1rem}h2{font-size:1.15rem;margin:2.4rem 0 .5rem}
p{margin:.3rem 0 .8rem;color:#555c63;max-width:48rem}
.tiles{display:flex;flex-wrap:wrap;gap:.75rem}
.tile{flex:1 1 8rem;padding:.7rem 1rem;background:#f4f6f8;border-radius:.5rem}
.tile b{display:block;font-size:1.35rem;font-weight:600}.tile span{color:#555c63;font-size:.85rem}
table{border-collapse:collapse;margin:.4rem 0;font-variant-numeric:tabular-nums}
td,th{padding:.3rem 1.4rem .3rem 0;text-align:right;border-bottom:1px solid #e2e5e8;vertical-align:top}
th{font-weight:600;color:#555c63;font-size:.85rem;white-space:nowrap}
td:first-child,th:first-child,.text td,.text th{text-align:left}
img{max-width:100%;margin:.4rem 0}
pre{background:#f4f6f8;border-radius:.5rem;padding:.8rem 1rem;overflow:auto;font-size:.85rem;white-space:pre-wrap}
"""

_Row = Sequence[object]


def page(record: Record, level: str, settings: str) -> str:
    """Returns the page.

    Args:
        record: The course of the training.
        level: The opt level, or the precision's name.
        settings: What the level sets, and what was set beside it.
    """
    parts = [_tiles(record, level), _scales(record), _steps(record), _course(record), _modules(record)]
    parts.append(f"<h2>Settings</h2><pre>{escape(settings)}</pre>")
    head = "<!doctype html><html lang='en'><meta charset='utf-8'><title>Mixed precision report</title>"
    return f"{head}<style>{_STYLE}</style><h1>Mixed precision report</h1>{''.join(parts)}</html>\n"


def _tiles(record: Record, level: str) -> str:
    tiles = {"level": level, "batches": str(len(record.seconds))}
    if record.steps:
        tiles["steps made"] = str(sum(counts[Outcome.STEPPED] for counts in record.steps.values()))
        tiles["steps skipped"] = str(sum(counts[Outcome.SKIPPED] for counts in record.steps.values()))
    if record.seconds:
        tiles["median batch time"] = f"{1e3 * median(record.seconds):.1f} ms"
    shown = (f"<div class='tile'><b>{escape(value)}</b><span>{name}</span></div>" for name, value in tiles.items())
    return f"<div class='tiles'>{''.join(shown)}</div>"


def _scales(record: Record) -> str:
    if not record.scales:
        return ""
    about = (
        "A scale is halved when a backward pass overflows, and the step is skipped; it grows after many clean passes "
        "in a row. A few skips at the start are how a scale finds its height."
    )
    rows = [
        [
            name,
            account.attempts,
            account.overflows,
            f"{account.overflows / max(1, account.attempts):.2%}",
            account.nonfinite_losses,
            _power(account.scale),
            f"{_power(account.lowest)} to {_power(account.highest)}",
        ]
        for name, account in record.accounts.items()
    ]
    heads = ["loss", "backward passes", "overflows", "share", "loss itself non-finite", "scale now", "range"]
    return f"<h2>Loss scales</h2><p>{about}</p>{_image('loss scales', scales_picture(record))}{_table(heads, rows)}"


def _steps(record: Record) -> str:
    rows = [[name, *(counts[outcome] for outcome in Outcome)] for name, counts in record.steps.items()]
    return f"<h2>Steps</h2>{_table(['optimizer', *(o.value for o in Outcome)], rows)}" if rows else ""


def _course(record: Record) -> str:
    if not record.seconds:
        return ""
    about = (
        "Small gradients underflow to zero in half precision. Dead units give zeros at every level: compare with a "
        "report at O0. A share well above that one asks for a higher scale."
    )
    return f"<h2>Underflows and time</h2><p>{about}</p>{_image('zeros and time', course_picture(record))}"


def _modules(record: Record) -> str:
    rows = [[*kind, len(names), _few(names)] for kind, names in record.modules.items()]
    if not rows:
        return ""
    about = "Modules without children, as they ran in the first batch; alike ones together."
    heads = ["class", "weights", "input", "output", "how many", "which"]
    return f"<h2>What ran in which dtype</h2><p>{about}</p>{_table(heads, rows, 'text')}"


def _few(names: Sequence[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _power(scale: float) -> str:
    mantissa, exponent = math.frexp(scale)
    return f"2{str(exponent - 1).translate(_RAISED)}" if mantissa == 0.5 and abs(exponent) > 7 else f"{scale:g}"


def _image(name: str, png: bytes) -> str:
    return f'<img alt="{name}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'


def _table(heads: Iterable[str], rows: Iterable[_Row], kind: str = "") -> str:
    head = "".join(f"<th>{escape(h)}</th>" for h in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(c))}</td>" for c in row) + "</tr>" for row in rows)
    return f"<table class='{kind}'><tr>{head}</tr>{body}</table>"
