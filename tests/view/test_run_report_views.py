"""What the views and the report say, with a clock that the test turns."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from insitu.collect.options import Slot
from insitu.config import Config, load_config
from insitu.errors import RecordError
from insitu.progress.base import Progress, View, duration
from insitu.progress.live import LiveView
from insitu.progress.plain import PlainView
from insitu.storage.run_dir import RunDir
from insitu.storage.store import Score, Store
from insitu.types import DriftNote, Ledger, Outcome, Rollout, Status, Timings, Trajectory, Verdict
from insitu_train.curve import Curve, CurvePoint, curve_of, curve_svg
from insitu_train.report import EvaluationReport, FinalReport, ShownRollout, ShownTurn, render_report
from insitu_train.run_report import finish, show_run


class Clock:
    """Seconds as the test sets them."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def score(solved: int, total: int) -> Score:
    return Score.of([1.0] * solved + [0.0] * (total - solved))


def play(view: View, clock: Clock) -> None:
    """A short run as the loop tells it."""
    view.begin("insitu demo: pi 0.87.1, seed 0", 20)
    view.stage("held-out tasks before training", 4)
    for i in range(4):
        view.rollout_started(f"e{i}")
        clock.now += 2.0
        view.rollout_finished(f"e{i}", reward=float(i == 0), tokens=30)
    view.eval_done("held-out before", score(1, 4))
    view.stage("step 1 of 2", 8)
    for i in range(5):
        view.rollout_started(f"t{i}")
    for i in range(4):
        clock.now += 2.0
        view.rollout_finished(f"t{i}", reward=None if i == 0 else 1.0, tokens=30)
    view.note("a worker was replaced")
    view.step_done(1, 2, {"loss": 0.12345, "groups": 12})


def test_plain_says_one_line_per_event_without_escape_codes() -> None:
    clock, out = Clock(), io.StringIO()
    view = PlainView(out, clock)
    play(view, clock)
    clock.now += 20
    view.rollout_finished("t4", reward=0.0, tokens=30)
    view.close()
    assert "\x1b" not in out.getvalue()
    assert out.getvalue().splitlines() == [
        "[    0.0 s] insitu demo: pi 0.87.1, seed 0, 20 rollouts planned",
        "[    0.0 s] held-out tasks before training (4)",
        "[    8.0 s] held-out before: 0.250 (1/4 solved)",
        "[    8.0 s] step 1 of 2 (8)",
        "[   16.0 s] a worker was replaced",
        "[   16.0 s] step 1/2 loss=0.1235 groups=12 left=24 s",
        "[   36.0 s] step 1 of 2: 5/8 done, 0 running solved=0.75 tokens/s=7 left=44 s",
    ]


def test_live_shows_stage_rates_and_what_is_left() -> None:
    clock, out = Clock(), io.StringIO()
    view = LiveView(Console(file=out, width=100, force_terminal=True), clock)
    play(view, clock)
    still = io.StringIO()
    Console(file=still, width=100).print(view.render())
    view.close()
    view.close()
    text = still.getvalue()
    for part in (
        "insitu demo: pi 0.87.1, seed 0",
        "step 1 of 2",
        "4/8",
        "1 running, 8 done",
        "solve rate  1.00",
        "15 tokens/s",
        "time left   24 s",
        "before 0.25 (1/4)",
        "loss 0.123",
        "a worker was replaced",
    ):
        assert part in text, part
    assert text.count("step 1") == 1, "one step number"
    assert text.endswith("\n\n"), "the terminal's echo of Ctrl-C needs a line of its own"
    assert "\x1b[" in out.getvalue(), "the live display was never drawn"


@pytest.mark.parametrize("width", [60, 80, 100])
def test_live_cuts_nothing_of_a_long_run(width: int) -> None:
    clock = Clock()
    view = LiveView(Console(file=io.StringIO(), width=width, force_terminal=True), clock)
    play(view, clock)
    for i in range(1230):
        view.rollout_finished(f"f{i}", reward=0.0, tokens=30)
    for i in range(12):
        view.rollout_started(f"r{i}")
    for i in range(5, 30, 5):
        view.eval_done(f"held-out step {i}", score(64 + i, 128))
    late = {"calls_mean": 4.21, "entropy": 0.4213, "max_logprob_gap": 3.34e-5, "tokens_trained": 12345}
    view.step_done(25, 30, {"effective_groups": 12, **late, "reward_mean": 0.625})
    still = io.StringIO()
    Console(file=still, width=width).print(view.render())
    view.close()
    lines = still.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    assert "…" not in still.getvalue()
    for label in ("  rollouts  ", "  sampled  ", "  scores  ", "  last step  "):
        assert sum(line.startswith(label) for line in lines) == 1, label
    said = " ".join(still.getvalue().split())
    for part in ("13 running, 1238 done", "solve rate 0.00", "time left", "before 0.25 (1/4)"):
        assert part in said, part
    assert "step 25 0.70 (89/128)" in said, "the newest evaluation"
    row = next(line for line in lines if line.startswith("  last step"))
    assert row.split()[2:6] == ["reward_mean", "0.625", "tokens_trained", "12345"], "what tells most is first"
    assert "max_logprob_gap 3.34e-05" in said


def test_the_first_stage_is_drawn_before_the_run_has_a_name() -> None:
    clock, out = Clock(), io.StringIO()
    view = LiveView(Console(file=out, width=100, force_terminal=True), clock)
    view.stage("starting the learner and the agents")
    clock.now += 7
    view.begin("pi 0.87.1, seed 0", 20)
    view.close()
    assert "starting the learner and the agents" in out.getvalue()
    plain = io.StringIO()
    said = PlainView(plain, clock)
    said.stage("starting the learner and the agents")
    clock.now += 7
    said.begin("pi 0.87.1, seed 0", 20)
    assert plain.getvalue().splitlines()[1].startswith("[    7.0 s] pi"), "the clock of a run starts once"


def test_an_evaluation_beside_a_step_has_its_own_rate() -> None:
    clock, out = Clock(), io.StringIO()
    view = PlainView(out, clock)
    view.stage("step 2 of 4, beside held-out tasks after step 1", 4)
    for name, reward in (("train/00002/000/00", 1.0), ("eval_during/00001/000/00", 0.0)):
        view.rollout_started(name)
        view.rollout_finished(name, reward=reward, tokens=30)
    clock.now += 20
    view.rollout_finished("train/00002/000/01", reward=0.0, tokens=30)
    assert "3/4 done, 0 running eval_during solved=0.00, train solved=0.50 tokens/s" in out.getvalue()
    live = LiveView(Console(file=io.StringIO(), width=100, force_terminal=True), clock)
    live.rollout_finished("train/00002/000/01", reward=1.0, tokens=1)
    live.rollout_finished("eval_during/00001/000/01", reward=0.0, tokens=1)
    still = io.StringIO()
    Console(file=still, width=100).print(live.render())
    assert "solve rate  eval_during 0.00, train 1.00" in still.getvalue()


def test_progress_before_anything_is_known() -> None:
    progress = Progress(clock=Clock())
    progress.begin("t", 10)
    assert progress.scores(lambda score: "some") == ""
    assert progress.seconds_left is None
    assert progress.tokens_per_s == 0


def test_tokens_per_second_forget_what_is_long_ago() -> None:
    clock = Clock()
    progress = Progress(clock=clock)
    progress.begin("t", 10)
    progress.rollout_finished("a", 1.0, 300)
    clock.now += 10
    assert progress.tokens_per_s == pytest.approx(30)
    clock.now += 100
    assert progress.tokens_per_s == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "unknown"), (0.4, "0 s"), (59.6, "1 min 00 s"), (200, "3 min 20 s"), (3900, "1 h 05 min")],
)
def test_duration(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_wilson_interval_against_published_values() -> None:
    """scipy.stats.binomtest(22, 128).proportion_ci(method="wilson") and the edges."""
    low, high = score(22, 128).low, score(22, 128).high
    assert (low, high) == (pytest.approx(0.1164, abs=2e-4), pytest.approx(0.2465, abs=2e-4))
    assert score(0, 10).low == 0.0
    assert score(0, 10).high == pytest.approx(0.2775, abs=2e-4)
    assert score(10, 10).high == pytest.approx(1.0)
    assert (score(0, 0).low, score(0, 0).high) == (0.0, 1.0)


@given(total=st.integers(1, 500), data=st.data())
def test_wilson_holds_the_rate(total: int, data: st.DataObject) -> None:
    rate = score(data.draw(st.integers(0, total)), total)
    assert 0 <= rate.low <= rate.rate + 1e-9
    assert rate.rate - 1e-9 <= rate.high <= 1


def svg_of(curve: Curve) -> ET.Element:
    return ET.fromstring(curve_svg(curve))


def test_the_curve_is_svg_inside_its_frame() -> None:
    points = tuple(CurvePoint(step=i, score=score(i, 10)) for i in range(1, 11))
    held = (CurvePoint(step=0, score=score(1, 10)), CurvePoint(step=10, score=score(9, 10)))
    root = svg_of(Curve(title="pi <&> seed 0", train=points, heldout=held))
    svg = "{http://www.w3.org/2000/svg}"
    texts = [text.text for text in root.iter(svg + "text")]
    assert "pi <&> seed 0" in texts
    assert {"0.10", "0.90"} <= set(texts)
    dots = [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in root.iter(svg + "circle")]
    assert len(dots) == 2 + 10 + 2
    assert all(0 < x < 720 and 0 < y < 400 for x, y in dots)
    rising = [y for _, y in dots[2:12]]
    assert rising == sorted(rising, reverse=True), "a higher solve rate is drawn higher"


def test_the_curve_has_colours_for_a_dark_page_and_a_title_for_readers() -> None:
    during = tuple(CurvePoint(step=i, score=score(i, 10)) for i in (0, 4, 8))
    graded = CurvePoint(step=2, score=Score.of([0.5, 0.5, 0.5, 0.0]))
    text = curve_svg(Curve(title="Tasks solved by pi", train=(graded, graded), heldout=during))
    assert "@media (prefers-color-scheme:dark)" in text
    assert "<title>Tasks solved by pi</title>" in text
    assert not re.search(r'(fill|stroke)="#', text), "colours are in the style only"
    assert text.count('r="5" class="heldout"') == 3, "held-out points during training"
    assert "mean reward of both" in text


@pytest.mark.parametrize("steps", [0, 1])
def test_the_curve_of_almost_nothing(steps: int) -> None:
    points = tuple(CurvePoint(step=i, score=score(1, 2)) for i in range(steps))
    assert svg_of(Curve(title="t", train=points, heldout=points[:1])) is not None


def report(
    before: Score | None = None,
    after: Score | None = None,
    numbers: Mapping[str, object] | None = None,
    **more: object,
) -> FinalReport:
    before, after = before or score(22, 128), after or score(112, 128)
    heldout = EvaluationReport(name="held-out", before=before, after=after, numbers=numbers or {})
    values: dict[str, object] = {
        "run_dir": Path("/r"),
        "heldout": heldout,
        "ledger": Ledger(captured=1200, trained=1000, excluded={"degenerate": 150, "evaluation": 50}),
        "wall_s": 423.0,
        "steps": 30,
        "updates": 30,
        "rollouts": 3136,
        "max_logprob_gap": 3.3e-5,
    }
    return FinalReport(**(values | more))  # type: ignore[arg-type]


def test_report_says_rates_with_counts_ledger_and_places() -> None:
    text = render_report(report(curve=Path("/r/curve.svg"), categories={"swap": (score(1, 4), score(4, 4))}))
    for line in (
        "  before  0.17 (22/128, 95 % 0.12 to 0.25)",
        "  after   0.88 (112/128, 95 % 0.81 to 0.92)",
        "    swap  0.25 -> 1.00  (1/4 -> 4/4)",
        "  captured              1,200",
        "  excluded: degenerate    150",
        "  balanced",
        "30 optimizer steps, 3136 rollouts in 7 min 03 s; largest sampler-trainer logprob gap 3.3e-05",
        "curve  /r/curve.svg",
        "run    /r",
        "look   insitu view /r",
    ):
        assert line in text.splitlines(), line


def levels(value: float, **more: float) -> dict[str, float]:
    found = {"solve_rate": value, **more}
    return {
        f"{name}{end}": rate + off
        for name, rate in found.items()
        for end, off in (("", 0), ("_low", -0.1), ("_high", 0.1))
    }


def test_one_report_has_gain_best_step_early_stop_and_every_evaluation(tmp_path: Path) -> None:
    with RunDir.create(stopping(tmp_path / "r")) as run, run.store() as store:
        fill(store)
        for slot in range(4):
            store.put_rollout("eval_after.hard", 2, slot, 0, rollout(f"h{slot}", solved=slot > 2))
    numbers = {
        "before": levels(0.25),
        "after": levels(0.75, pass_at_2=0.5) | {"pass_at_2_tasks": 3},
        "tasks": 4,
        "gain": {"value": 0.5, "low": 0.1, "high": 0.8, "tasks": 4},
    }
    summary = {
        **SUMMARY,
        "evaluations": {"heldout": numbers, "hard": {**numbers, "before": {}, "gain": None}},
        "best_step": 1,
        "best_heldout_reward": 0.875,
        "stopped_early": True,
    }
    text, how = finish(tmp_path / "r", summary), f"insitu export {tmp_path / 'r'} --checkpoint best --out DIR"
    for line in (
        "  gain    +0.50 (95 % +0.10 to +0.80)",
        "  pass@2  0.50 (95 % 0.40 to 0.60, 3 of 4 tasks)",
        f"  best    mean reward 0.88 after step 1: {how}",
        "  hard  none graded -> 0.25 (1/4, 95 % 0.05 to 0.70)",
        "ended after step 2 of 9: 3 evaluations without a better held-out result (run.stop_after_evals)",
    ):
        assert line in text.splitlines(), line
    with RunDir.open(tmp_path / "r") as run:
        run.write_summary(summary)
    assert show_run(tmp_path / "r").endswith(text)
    for step, reward in ((1, 0.2), (2, 0.25)):  # the last one is named too where none is better than before
        text = finish(tmp_path / "r", {**summary, "best_step": step, "best_heldout_reward": reward})
        best = f"  best    mean reward {reward:.2f} after step {step}, no better than 0.25 before training"
        assert f"{best}: {how}" in text
    plain = render_report(report())
    assert not any(word in plain for word in ("gain", "best", "ended", "Further", "Task sets"))


def test_report_does_not_hide_a_token_that_was_left_out() -> None:
    text = render_report(report(max_logprob_gap=1.36e-4, mismatched=1))
    assert "largest sampler-trainer logprob gap 1.4e-04, 1 token excluded" in text


def test_a_mean_reward_is_shown_where_rewards_are_partial() -> None:
    graded = Score.of([0.0, 0.5, 0.75, 1.0])
    text = render_report(report(before=score(1, 4), after=graded, categories={"f": (score(1, 4), graded)}))
    assert "  before  0.25 (1/4, 95 % 0.05 to 0.70)\n" in text
    assert "  after   0.25 (1/4, 95 % 0.05 to 0.70), mean reward 0.56\n" in text
    assert "    f  0.25 -> 0.25  (1/4 -> 1/4), mean reward 0.25 -> 0.56\n" in text
    clock, out = Clock(), io.StringIO()
    live = LiveView(Console(file=io.StringIO(), width=100, force_terminal=True), clock)
    for view in (PlainView(out, clock), live):
        view.stage("held-out tasks after training", 4)
        for reward in (0.0, 0.5, 0.75, 1.0):
            view.rollout_finished("r", reward=reward, tokens=1)
        clock.now += 20
        view.rollout_finished("r", reward=None, tokens=1)
        view.eval_done("held-out after", graded)
    assert "held-out after: 0.250 (1/4 solved), mean reward 0.562\n" in out.getvalue()
    assert " solved=0.25 reward=0.56 " in out.getvalue()
    still = io.StringIO()
    Console(file=still, width=100).print(live.render())
    assert "solve rate  0.25, mean reward 0.56" in still.getvalue()
    assert "held-out after 0.25, mean reward 0.56 (1/4)" in still.getvalue()


def test_the_curve_draws_mean_rewards_where_they_are_partial() -> None:
    def points(*scores: Score) -> tuple[CurvePoint, ...]:
        return tuple(CurvePoint(step=i, score=s) for i, s in enumerate(scores))

    low, high = Score.of([0.2, 0.2]), Score.of([0.8, 0.6])
    root = svg_of(Curve(title="t", train=points(low, high), heldout=points(low, high)))
    svg = "{http://www.w3.org/2000/svg}"
    texts = [text.text for text in root.iter(svg + "text")]
    assert "mean reward of both" in texts
    dots = [c for c in root.iter(svg + "circle") if c.attrib["class"] == "reward"]
    heights = [float(c.attrib["cy"]) for c in dots[1:]]
    assert len(heights) == 2
    assert heights[0] > heights[1], "a higher reward is drawn higher, though no rollout was solved"
    lines = [p for p in root.iter(svg + "path") if p.attrib.get("class") == "reward"]
    assert len(lines) == 2, "the moving mean of training and the held-out points"
    binary = svg_of(Curve(title="t", train=points(score(0, 2), score(1, 2)), heldout=points(score(1, 2))))
    assert not [c for c in binary.iter(svg + "circle") if c.attrib["class"] == "reward"]


def test_what_was_not_measured_is_not_a_zero() -> None:
    text = render_report(
        report(before=score(0, 0), after=score(0, 0), max_logprob_gap=None, updates=0, steps=3)
    )
    assert "  before  none graded\n" in text
    assert "0 optimizer steps (3 of 3 had no update), 3136 rollouts in 7 min 03 s\n" in text
    assert "gap" not in text


def test_report_does_not_hide_an_unbalanced_ledger() -> None:
    assert "NOT BALANCED" in render_report(report(ledger=Ledger(captured=2, trained=1)))


def test_report_shows_a_rollout_turn_by_turn_within_the_width() -> None:
    turns = (
        ShownTurn(speaker="task", text="Fix clamp() in shapes.py."),
        ShownTurn(speaker="model", text='read {"path": "shapes.py"}' + "x" * 200),
        ShownTurn(speaker="tool", text="\n".join(f"line {i}\x1b[31m\x07" for i in range(9))),
    )
    shown = ShownRollout(title="toy-17 before training", turns=turns, verdict="unresolved, 2 of 4 cases")
    lines = render_report(report(shown=(shown,)), width=60).splitlines()
    assert "  task  | Fix clamp() in shapes.py." in lines
    assert "        | ... 3 more lines" in lines
    assert "  => unresolved, 2 of 4 cases" in lines
    assert not any("\x1b" in line or "\x07" in line for line in lines), "a tool could drive the terminal"
    assert all(len(line) <= 60 for line in lines[: lines.index("Held-out solve rate")])


def rollout(name: str, *, solved: bool, category: str = "swap", tokens: int = 0) -> Rollout:
    reward = float(solved)
    outcome = Outcome.RESOLVED if solved else Outcome.UNRESOLVED
    return Rollout(
        id=name,
        task_id=name,
        category=category,
        status=Status.OK,
        reward=reward,
        trajectory=Trajectory(segments=(), turns=(), ledger=Ledger(captured=tokens, trained=tokens)),
        verdict=Verdict(outcome=outcome, reward=reward, trust="strong"),
        changed={},
        deleted=(),
        timings=Timings(),
    )


def stopping(folder: Path) -> Config:
    tables = {"eval": [{"every_steps": 1, "count": 4}, {"name": "hard", "samples": 2, "count": 4}]}
    return load_config(None, [f"run.dir={folder}", "run.steps=9", "run.stop_after_evals=3"], tables)


def stored_run(folder: Path) -> Path:
    config = load_config(None, [f"run.dir={folder}", "run.steps=2", "eval.count=4"])
    with RunDir.create(config) as run, run.store() as store:
        fill(store)
    return folder


def fill(store: Store) -> None:
    for slot in range(4):
        store.put_rollout("eval_before", 0, slot, 0, rollout(f"b{slot}", solved=slot == 0))
        store.put_rollout("train", 1, 0, slot, rollout(f"t{slot}", solved=slot < 2, tokens=3))
        store.put_rollout("eval_after", 2, slot, 0, rollout(f"a{slot}", solved=slot > 0))
    trained = [f"t{slot}" for slot in range(4)]
    store.assign(1, trained)
    account = Ledger(captured=12, trained=12)
    store.commit_step(1, {"loss": 0.5}, "checkpoints/1", "h", account, trained=trained)


SUMMARY = {
    "agent": "script",
    "seed": 0,
    "ledger": {"captured": 12, "trained": 12, "excluded": {}},
    "wall_s": 12.0,
    "rl_steps": 2,
    "updates": 2,
    "rollouts": 12,
    "max_logprob_gap": 1e-6,
    "max_logprob_gap_seen": 1e-6,
    "mismatched": 0,
    "evaluations": {},
    "best_step": None,
    "stopped_early": False,
}


def test_the_curve_of_a_stored_run(tmp_path: Path) -> None:
    with Store(tmp_path / "s") as store:
        fill(store)
        curve = curve_of(store, "t")
    assert curve.train == (CurvePoint(step=1, score=score(2, 4)),)
    assert curve.heldout == (CurvePoint(step=0, score=score(1, 4)), CurvePoint(step=2, score=score(3, 4)))


def test_show_says_how_tries_ended_where_not_each_decided_its_rollout(tmp_path: Path) -> None:
    folder = stored_run(tmp_path / "r")
    assert "attempts:" not in show_run(folder)
    with RunDir.open(folder) as run, run.store() as store:
        place = Slot(phase="train", step=2, group=0, slot=0)
        store.plan([place], "t", 1)
        store.start(place.rollout_id, 1, 1)
        store.recover()
        store.start(place.rollout_id, 2, 1)
    assert "  attempts: 12 decided, 1 interrupted, 1 running\n" in show_run(folder)


def test_finish_leaves_curve_and_report_and_show_reads_them_again(tmp_path: Path) -> None:
    folder = stored_run(tmp_path / "r")
    assert "not finished: 1 of 2 steps" in show_run(folder)
    assert "  rollouts: 4 trained, 8 discarded (evaluation)" in show_run(folder)
    text = finish(folder, SUMMARY)
    assert "  before  0.25 (1/4, " in text
    assert "  after   0.75 (3/4, " in text
    assert (folder / "report.txt").read_text() == text
    assert (folder / "curve.svg").read_text().startswith("<svg")
    with RunDir.open(folder) as run:
        run.write_summary(SUMMARY)
    shown = show_run(folder)
    assert "  after   0.75 (3/4, " in shown
    assert "  step    1  solved 0.50 (2/4)  trained 12 of 12 tokens" in shown
    assert "  held-out after 0 steps  0.25 (1/4, " in shown


def test_report_counts_calls_that_did_not_parse(tmp_path: Path) -> None:
    folder = stored_run(tmp_path / "r")
    assert "calls  " not in finish(folder, SUMMARY)
    calls = {"malformed_calls": 3, "unknown_tools": 1, "unparsed_share": 0.25}
    with RunDir.open(folder) as run, run.store() as store:
        store.commit_step(2, calls, "", "", Ledger(), trained=(), discarded={})
    line = "calls  3 malformed, 1 of unknown tools; share of the replies 25.0% in step 2\n"
    assert line in finish(folder, SUMMARY)


def test_report_tells_how_long_ranks_shared_rows(tmp_path: Path) -> None:
    folder = stored_run(tmp_path / "r")
    assert "shared  " not in finish(folder, SUMMARY)
    with RunDir.open(folder) as run, run.store() as store:
        for step, rows in ((2, 3), (3, 0)):
            numbers = {"shared_rows": rows, "shared_s": 1.5 * rows, "seconds": 6.0}
            store.commit_step(step, numbers, "", "", Ledger(), trained=(), discarded={})
    assert (
        "shared  3 rows in 1 of 3 steps were too long for one rank and computed by several: 4.5 of 12.0 s of"
        " updates\n"
    ) in finish(folder, SUMMARY)
    assert [line.split("  ")[-1] for line in show_run(folder).splitlines() if "rows shared" in line] == [
        "rows shared by ranks 3"
    ]


def test_show_counts_drifts_by_cause(tmp_path: Path) -> None:
    folder = stored_run(tmp_path / "r")
    assert "drift:" not in show_run(folder)
    with RunDir.open(folder) as run, run.store() as store:
        made = rollout("d0", solved=True)
        notes = tuple(DriftNote(kind="edited", cause="default added", tokens=count) for count in (3, 4))
        drifted = replace(made, trajectory=replace(made.trajectory, drifts=notes))
        store.put_rollout("eval_during", 1, 0, 0, drifted)
    assert "  drift: total edited default added: 2, 7 sampled tokens concerned" in show_run(folder)


def test_show_says_that_an_evaluation_is_not_whole(tmp_path: Path) -> None:
    folder = stored_run(tmp_path / "r")
    assert "so far" not in show_run(folder)
    with RunDir.open(folder) as run, run.store() as store:
        slots = [Slot(phase="eval_during.other", step=1, group=group, slot=0) for group in range(4)]
        for slot in slots:
            store.plan([slot], "task", 1)
        done = replace(rollout("d0", solved=True), id=slots[0].rollout_id)
        store.put_rollout("eval_during.other", 1, 0, 0, done)
    assert "  other after 1 steps  1.00 (1/1, 95 % 0.21 to 1.00)  1 of 4 rollouts so far" in show_run(folder)


def test_show_of_nothing_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="not a run directory"):
        show_run(tmp_path)
