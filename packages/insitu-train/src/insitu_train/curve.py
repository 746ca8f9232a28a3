"""Learning curve as SVG.

Solve rate over optimizer steps: a dot per step with its moving mean (training tasks), and held-out points
with 95 % intervals. With partial rewards, mean rewards are drawn too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from insitu.progress.base import rounded
from insitu.storage.score import Score
from insitu.storage.store import Store
from insitu_train.phases import is_heldout

_WIDTH, _HEIGHT = 720, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 56, 56
_MEAN_OF = 5
"""Window of the centred moving mean, in steps."""
_TRAIN, _HELDOUT, _REWARD = "train", "heldout", "reward"
"""Classes of the drawn points; mean rewards of both are `reward`."""
STYLE = """<style>
.paper{fill:#fff}.grid{stroke:#e3e6ea}text{fill:#30363d}
.each{fill:#9db7d5}.train{fill:#2f6db3;stroke:#2f6db3}.heldout{fill:#c2571a;stroke:#c2571a}
.reward{fill:#2f8f4e;stroke:#2f8f4e}path{fill:none!important}
@media (prefers-color-scheme:dark){
.paper{fill:#0d1117}.grid{stroke:#30363d}text{fill:#d1d7de}
.each{fill:#3d5a80}.train{fill:#6ca8f0;stroke:#6ca8f0}.heldout{fill:#f0883e;stroke:#f0883e}
.reward{fill:#56d364;stroke:#56d364}}
</style>"""
"""Colours for a light and a dark page; the browser chooses, also in an <img>."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """Solve rate after `step` optimizer steps."""

    step: int
    score: Score


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Data of a learning curve."""

    title: str
    train: tuple[CurvePoint, ...]
    heldout: tuple[CurvePoint, ...]

    @property
    def partial(self) -> bool:
        return any(point.score.partial for point in (*self.train, *self.heldout))


def curve_of(store: Store, title: str) -> Curve:
    """Return the curve of a stored run: committed training steps and the held-out score."""
    train = [CurvePoint(step=record.step, score=store.step_score(record.step)) for record in store.steps()]
    evals = sorted((step, phase) for phase, step in store.phases() if is_heldout(phase))
    heldout = [CurvePoint(step=step, score=store.scores(phase, step)[""]) for step, phase in evals]
    return Curve(
        title=title,
        train=tuple(point for point in train if point.score.total),
        heldout=tuple(point for point in heldout if point.score.total),
    )


def curve_svg(curve: Curve) -> str:
    """Return the curve as one SVG document."""
    last = max((p.step for p in (*curve.train, *curve.heldout)), default=0) or 1
    parts = [*_frame(curve, last)]
    for point in curve.train:
        parts.append(_dot(_x(point.step, last), _y(point.score.rate), 3, "each"))
    parts += _moving_mean(curve.train, [p.score.rate for p in curve.train], last, _TRAIN)
    if curve.partial:
        parts += _moving_mean(curve.train, [p.score.reward_mean for p in curve.train], last, _REWARD)
        parts += [_dot(_x(p.step, last), _y(p.score.reward_mean), 4, _REWARD) for p in curve.heldout]
        parts += _dotted([(_x(p.step, last), _y(p.score.reward_mean)) for p in curve.heldout], _REWARD)
    for point in curve.heldout:
        parts += _interval(_x(point.step, last), point.score)
    parts += _dotted([(_x(p.step, last), _y(p.score.rate)) for p in curve.heldout], _HELDOUT)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif">'
    )
    return "\n".join([head, f"<title>{escape(curve.title)}</title>", STYLE, *parts, "</svg>"]) + "\n"


def _moving_mean(
    points: Sequence[CurvePoint], values: Sequence[float], last: int, kind: str
) -> Iterable[str]:
    if len(points) < 2:
        return
    means = [sum(window) / len(window) for window in _windows(values)]
    line = _path((_x(p.step, last), _y(m)) for p, m in zip(points, means, strict=True))
    yield f'<path d="{line}" class="{kind}" stroke-width="2"/>'


def _dotted(points: Sequence[tuple[float, float]], kind: str) -> Iterable[str]:
    if len(points) > 1:
        yield f'<path d="{_path(points)}" class="{kind}" stroke-dasharray="2 4"/>'


def _frame(curve: Curve, last: int) -> Iterable[str]:
    yield f'<rect width="{_WIDTH}" height="{_HEIGHT}" class="paper"/>'
    yield _text(_LEFT, 24, curve.title, size=15, weight="bold")
    yield _dot(_LEFT + 4, 41, 4, _TRAIN) + _text(_LEFT + 14, 45, f"training tasks (mean of {_MEAN_OF} steps)")
    yield _dot(_LEFT + 244, 41, 4, _HELDOUT) + _text(_LEFT + 254, 45, "held-out tasks with 95 % interval")
    if curve.partial:
        yield _dot(_LEFT + 474, 41, 4, _REWARD) + _text(_LEFT + 484, 45, "mean reward of both")
    for tick in range(6):
        y = _y(tick / 5)
        yield f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" class="grid"/>'
        yield _text(_LEFT - 8, y + 4, f"{tick / 5:.1f}", anchor="end")
    stride = max(1, math.ceil(last / 10))
    for step in range(0, last + 1, stride):
        yield _text(_x(step, last), _HEIGHT - _BOTTOM + 18, str(step), anchor="middle")
    yield _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 14, "optimizer steps", anchor="middle")
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    axis = "solve rate, mean reward" if curve.partial else "solve rate"
    label = _text(18, middle, axis, anchor="middle")
    yield f'<g transform="rotate(-90 18 {middle})">{label}</g>'


def _interval(x: float, score: Score) -> Iterable[str]:
    low, high = (_y(bound) for bound in (score.low, score.high))
    bar = f"M{x - 5:.1f} {low:.1f}h10M{x - 5:.1f} {high:.1f}h10M{x:.1f} {low:.1f}V{high:.1f}"
    yield f'<path d="{bar}" class="heldout"/>'
    yield _dot(x, _y(score.rate), 5, _HELDOUT)
    above = score.rate < 0.5
    y = high - 8 if above else low + 18
    yield _text(x, y, rounded(score.rate), anchor="middle", weight="bold")


def _x(step: float, last: int) -> float:
    return _LEFT + 12 + (_WIDTH - _LEFT - _RIGHT - 24) * step / last


def _y(rate: float) -> float:
    return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * rate


def _windows(values: Sequence[float]) -> Iterable[Sequence[float]]:
    half = _MEAN_OF // 2
    return (values[max(0, i - half) : i + half + 1] for i in range(len(values)))


def _path(points: Iterable[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _dot(x: float, y: float, radius: float, kind: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" class="{kind}"/>'


def _text(
    x: float, y: float, text: str, *, size: int = 12, anchor: str = "start", weight: str = "normal"
) -> str:
    style = f'font-size="{size}" text-anchor="{anchor}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'
