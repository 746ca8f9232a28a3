"""What each address of the viewer answers, on directories as runs leave them."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from run_lab import BEGAN_S, CORPUS, GROUPS, SLOTS, STEPS, Flavour, make_rollout
from web_lab import Client, viewing

from insitu.storage.queries import FILTERS, SORTS
from insitu.storage.run_dir import RunDir
from insitu.storage.store import Store
from insitu_view.web import search
from tests.fakes.old_store import make_old

ONE = "train/00002/000/00"
TROUBLED = "train/00001/000/03"
STORED = STEPS * GROUPS * SLOTS + 8
OF_RUN = ("overview", "rollouts", "facets", "tasks", "health", "checks", "cheats", "config", "run_log")
OF_ROLLOUT = ("rollout", "transcript", "minimap", "diff", "log", "raw", "artifacts")


def decode_tokens(body: bytes) -> dict[str, Any]:
    size = struct.unpack_from("<I", body)[0]
    header = orjson.loads(body[4 : 4 + size])
    types = {"u32": "<u4", "i32": "<i4", "f32": "<f4", "u8": "u1"}
    base = 4 + size
    found: dict[str, Any] = {"header": header}
    for array in header["arrays"]:
        assert (base + array["offset"]) % int(types[array["type"]][-1]) == 0
        found[array["name"]] = np.frombuffer(
            body, types[array["type"]], array["length"], base + array["offset"]
        )
    at = base + header["text"]["offset"]
    found["text"] = body[at : at + header["text"]["bytes"]].decode()
    return found


async def test_runs_are_found_and_named(lab_run: Path, hostile_run: Path) -> None:
    async with viewing(lab_run.parent, hostile_run) as client:
        runs = {run["name"]: run for run in (await client.json("/api/runs"))["runs"]}
        assert set(runs) == {"lab", "<img src=x onerror=alert(1)>"}
        lab = runs["lab"]
        assert (lab["state"], lab["kind"], lab["step"], lab["rollouts"]) == (
            "finished",
            "train",
            STEPS,
            STORED,
        )
        assert (lab["heldout_before"], lab["heldout_now"]) == (0.25, 0.5)
        assert len(lab["spark"]) == STEPS
        await client.json("/api/%3Cimg%20src=x%20onerror=alert(1)%3E/overview")


async def test_overview_and_step_agree_with_the_store(lab_run: Path) -> None:
    async with viewing(lab_run) as client:
        shown = await client.json("/api/lab/overview")
        assert shown["steps"]["step"] == [1, 2, 3]
        ledger = shown["steps"]["ledger"]
        excluded = sum(sum(v) for name, v in ledger.items() if name not in ("captured", "trained"))
        assert sum(ledger["captured"]) == sum(ledger["trained"]) + excluded
        assert shown["steps"]["solved"] == [6, 6, 6]
        assert {(p["phase"], p["solved"]) for p in shown["heldout"] if not p["category"]} == {
            ("eval_before", 1),
            ("eval_after", 2),
        }
        assert shown["alarms"] == [{"name": "tamper_alarm", "steps": 1, "first": 2, "last": 2}]
        assert {row["text"] for row in shown["why"]} >= {"case # raised NameError"}
        reasons = {row["telling"] for row in shown["telling"]}
        assert "the agent tampered with the tests" in reasons
        assert any(why.startswith("the most frequent cause: ") for why in reasons)
        causes = (await client.json("/api/lab/facets"))["causes"]
        assert [cause["text"] for cause in causes] == [cause["text"] for cause in shown["why"]]
        listed = await client.json("/api/lab/rollouts", why="case # raised NameError", solved=0)
        assert listed["count"] == sum(c["n"] for c in causes if "NameError" in c["text"])
        assert "a held-out task that was solved before and is not now" in reasons
        assert (await client.json("/api/lab/overview", after=2))["steps"]["step"] == [3]

        step = await client.json("/api/lab/step", step=2)
        assert step["proof"] == "identical"
        assert [group["untrained"] for group in step["groups"]] == ["", "degenerate", "", ""]
        rows = [row for group in step["groups"] for row in group["rollouts"]]
        assert sum(row["planned"] for row in rows) == step["ledger"]["trained"]
        assert {row["planned"] for row in step["groups"][1]["rollouts"]} == {0}
        with Store(lab_run / "run.sqlite", readonly=True) as store:
            for row in rows:
                turns = store.rollout(row["id"]).trajectory.turns
                assert row["context"] == sum(len(turn.context_ids) for turn in turns)
        solved, unsolved = step["groups"][2]["rollouts"][:2]
        assert solved["advantage"] > 0 > unsolved["advantage"]
        await client.json("/api/lab/step", 404, step=9)


async def test_group_shows_where_its_rollouts_part(lab_run: Path) -> None:
    async with viewing(lab_run) as client:
        group = await client.json("/api/lab/group", phase="train", step=2, group=2)
        assert group["prompt"].startswith("Fix shop.py.")
        assert group["reference"] == "train/00002/002/00"
        same = [member["same_turns"] for member in group["rollouts"]]
        # All make the same first two calls; unsolved ones end with another reply.
        assert same == [4, 2, 4, 2]
        assert [member["last_words"] for member in group["rollouts"]] == ["looked"] * SLOTS


@pytest.mark.parametrize("sort", ["", *SORTS, *(f"-{name}" for name in SORTS)])
async def test_pages_of_a_list_hold_each_rollout_once(lab_run: Path, sort: str) -> None:
    async with viewing(lab_run) as client:
        seen: list[str] = []
        cursor: str | None = ""
        while cursor is not None:
            page = await client.json("/api/lab/rollouts", sort=sort, limit=7, cursor=cursor)
            seen += [row["id"] for row in page["rows"]]
            cursor = page["next"]
        assert len(seen) == len(set(seen)) == STORED


async def test_filters_count_what_they_list(lab_run: Path) -> None:
    values = {
        "phase": ("train", 48), "step": (2, 16), "account": (2, 16), "group_id": ("train/00002/000", 4),
        "task": ("task-1-1", 4), "task_set": ("", 56),
        "category": ("swap", 56), "status": ("truncated", 3), "outcome": ("tampered", 3),
        "trust": ("strong", 56),
        "state": ("trained", 36), "fate": ("degenerate", 12), "excluded": ("degenerate", 0),
        "why": ("case # raised NameError", 35), "error": ("the agent stopped", 12), "solved": (1, 21),
        "min_reward": (0.5, 21), "max_reward": (0.5, 35), "dropped": (1, 12), "egress": (1, 3),
        "retried": (1, 3), "malformed": (1, 35), "unknown_tool": (0, 21), "unparsed": (1, 35),
            "parts_left_out": (0, 56),
        "q": ("00002/000", 4),
    }  # fmt: skip
    assert set(values) == set(FILTERS)
    async with viewing(lab_run) as client:
        found = {}
        for name, (value, _) in values.items():
            page = await client.json("/api/lab/rollouts", **{name: value})
            assert page["count"] == len(page["rows"])
            found[name] = page["count"]
        assert found == {name: count for name, (_, count) in values.items()}
        both = await client.json("/api/lab/rollouts", outcome="tampered", step=1)
        assert [row["id"] for row in both["rows"]] == [TROUBLED]


async def test_task_sets_are_told_apart_on_every_page(mixed_run: Path, lab_run: Path) -> None:
    async with viewing(mixed_run) as client:
        (info,) = (await client.json("/api/runs"))["runs"]
        assert info["task_sets"] == ["s", "o"]
        facets = (await client.json("/api/mixed/facets"))["facets"]
        counts = Counter[str]()
        for facet in facets:
            counts[facet["task_set"]] += facet["n"]
        assert counts == {"s": 28, "o": 28}
        listed = await client.json("/api/mixed/rollouts", task_set="o", phase="eval_before")
        assert [row["group"] for row in listed["rows"]] == [3, 1]
        tasks = (await client.json("/api/mixed/tasks", phase="eval_after"))["tasks"]
        assert [(task["task"], task["task_set"], task["solved"], task["parts"]) for task in tasks] == [
            ("task-0-0", "s", 0, [[1, 1], [0, 1]]), ("task-0-0", "o", 1, [[0, 1], [1, 1]]),
            ("task-0-1", "s", 1, [[0, 1], [1, 1]]), ("task-0-1", "o", 0, [[0, 1], [0, 1]]),
        ]  # fmt: skip
        groups = (await client.json("/api/mixed/step", step=1))["groups"]
        assert [group["task_set"] for group in groups] == ["s", "o", "s", "o"]
        page = await client.json("/api/mixed/rollout", id="train/00001/001/00")
        assert (page["row"]["task_set"], page["agent"]) == ("o", "single_turn")
    async with viewing(lab_run) as client:
        assert (await client.json("/api/runs"))["runs"][0]["task_sets"] == []
        assert (await client.json("/api/lab/rollout", id=ONE))["agent"] == "pi"


async def test_bad_parameters_are_one_line(lab_run: Path) -> None:
    async with viewing(lab_run) as client:
        for path, query in (
            ("rollouts", {"limit": 100000}),
            ("rollouts", {"step": "x"}),
            ("rollout", {}),
            ("rollout", {"id": "x" * 300}),
            ("tokens", {"id": ONE, "start": -1}),
            ("transcript", {"id": ONE, "count": 10**6}),
        ):
            found = await client.json(f"/api/lab/{path}", 400, **query)
            assert "\n" not in found["error"]
        for path, query in (
            ("rollouts", {"sort": "nothing"}),
            ("rollouts", {"cursor": "x"}),
            ("rollout", {"id": "train/9/9/9"}),
            ("tokens", {"id": ONE, "segment": 77}),
        ):
            found = await client.json(f"/api/lab/{path}", 404, **query)
            assert str(lab_run) not in found["error"]


async def test_rollout_names_its_branches_and_its_proven_advantage(lab_run: Path) -> None:
    async with viewing(lab_run) as client:
        found = await client.json("/api/lab/rollout", id=ONE)
        assert [turn["label"] for turn in found["turns"]] == ["final", "wipe", "final", "subagent"]
        assert [segment["turns"] for segment in found["segments"]] == [[0, 1], [0, 2], [3]]
        spans = [segment["spans"] for segment in found["segments"]]
        assert [[span[0] for span in held] for held in spans] == [[0, 1], [0, 2], [3]]
        assert [held[-1][3] for held in spans] == [segment["tokens"] for segment in found["segments"]]
        # A turn that two rows share is trained in the first.
        assert [[span[4] == span[3] - span[2] for span in held] for held in spans] == [
            [True, True],
            [False, True],
            [True],
        ]
        assert sum(span[4] for held in spans for span in held) == found["credit"]["trained"]
        assert found["credit"]["proof"] == "identical"
        assert found["credit"]["advantage"] > 0
        assert found["verdict"]["outcome"] == "resolved"
        assert found["has"]["times"]
        assert found["began_s"] == found["attempts"][0]["began_s"] == BEGAN_S - 0.5
        assert found["waits"]["sampling_s"] == 2.0
        assert found["waits"]["longest"][0] == {"turn": 2, "kind": "tools", "s": 1.5}
        assert found["verdict"]["evidence"] == []
        other = await client.json("/api/lab/rollout", id=TROUBLED)
        assert other["verdict"]["evidence"][0]["expected"] == "2"
        assert found["neighbours"]["group"] == [f"train/00002/000/0{slot}" for slot in range(SLOTS)]
        assert found["has"]["log"]
        assert found["has"]["artifacts"]


async def test_transcript_has_the_text_of_messages_and_replies(lab_run: Path) -> None:
    async with viewing(lab_run) as client:
        found = await client.json("/api/lab/transcript", id=ONE)
        first, left, last, _ = found["turns"]
        assert [message["role"] for message in first["messages"]] == ["system", "user"]
        assert first["messages"][1]["text"] == "Fix shop.py."
        assert first["reply"]["calls"][0]["name"] == "bash"
        answer = {"role": "tool", "name": "bash", "text": "1 failed\nétoile 🎉"}
        assert left["messages"][0] == left["messages"][0] | answer
        assert (first["began_s"], first["ended_s"]) == (BEGAN_S, BEGAN_S + 0.5)
        assert (last["waited_s"], first["waited_s"]) == (1.5, None)
        assert last["reply"]["text"]["text"] == "done"
        short = await client.json("/api/lab/transcript", id=ONE, chars=3, start=2, count=1)
        assert short["turns"][0]["reply"]["text"] == {"text": "don", "chars": 4, "lines": 1}
        assert short["next"] == 3


async def test_tokens_are_those_of_the_store(lab_run: Path) -> None:
    with Store(lab_run / "run.sqlite", readonly=True) as store:
        segment = store.rollout(ONE).trajectory.segments[1]
    async with viewing(lab_run) as client:
        whole = decode_tokens((await client.get("/api/lab/tokens", id=ONE, segment=1))[1])
        assert (whole["id"] == segment.ids).all()
        assert (whole["mask"].astype(bool) == segment.mask).all()
        assert (whole["logprob"][segment.mask] == segment.logprobs[segment.mask]).all()
        assert np.isnan(whole["logprob"][~segment.mask]).all()
        text = whole["text"]
        units = text.encode("utf-16-le")
        assert whole["end"][-1] * 2 == len(units)
        assert "étoile 🎉" in text
        reasons = whole["header"]["reasons"]
        assert reasons[:3] == ["context", "trained", "trained in another row"]
        assert {reasons[r] for r in whole["reason"][segment.mask]} == {"trained"}
        assert "trained in another row" in {reasons[r] for r in whole["reason"][~segment.mask]}
        for start in (0, 5, len(segment.ids) - 3):
            part = decode_tokens(
                (await client.get("/api/lab/tokens", id=ONE, segment=1, start=start, count=9))[1]
            )
            stop = min(start + 9, len(segment.ids))
            for name in ("id", "mask", "turn", "version", "reason"):
                assert (part[name] == whole[name][start:stop]).all(), name
            assert np.array_equal(part["logprob"], whole["logprob"][start:stop], equal_nan=True)
        turn = decode_tokens((await client.get("/api/lab/tokens", id=ONE, turn=3))[1])
        assert turn["text"].endswith("looked<|im_end|>")
        assert turn["header"]["total"] == len(turn["id"])
        map_ = await client.json("/api/lab/minimap", id=ONE, segment=1)
        assert map_["tokens"] == len(segment.ids)
        assert sum(map_["masked"]) == segment.mask.sum()


async def test_other_pages_of_a_rollout(lab_run: Path) -> None:
    async with viewing(lab_run) as client:
        diff = await client.json("/api/lab/diff", id=TROUBLED)
        assert diff["files"][0]["text"] == "def f(): pass"
        assert diff["diff"].startswith("--- a/shop.py")
        assert diff["dropped"] == ["tests/conftest.py"]
        assert "output of the agent" in (await client.json("/api/lab/log", id=ONE))["text"]
        kept = (await client.json("/api/lab/artifacts", id=ONE))["artifacts"]
        assert [file["path"] for file in kept] == ["1/work/notes.txt"]
        status, body, answer = await client.get("/api/lab/download", id=ONE, artifact="1/work/notes.txt")
        assert (status, body) == (200, b"kept")
        assert answer.headers["Content-Disposition"] == 'attachment; filename="notes.txt"'
        assert answer.headers["Content-Security-Policy"].startswith("sandbox")
        status, body, _ = await client.get("/api/lab/download", id=ONE, file="shop.py")
        assert (status, body) == (200, b"def f(): pass")
        for path in ("../../config.toml", "/etc/passwd", "1/work/../../../../config.toml"):
            assert (await client.get("/api/lab/download", id=ONE, artifact=path))[0] == 404


async def test_tasks_health_cheats_and_config(lab_run: Path) -> None:
    async with viewing(lab_run) as client:
        tasks = (await client.json("/api/lab/tasks"))["tasks"]
        assert {(task["n"], task["solved"]) for task in tasks} == {(4, 2), (4, 0)}
        task = await client.json("/api/lab/task", task=tasks[0]["task"])
        assert task["prompt"] == "Fix shop.py."
        health = await client.json("/api/lab/health")
        assert health["waits"][0]["queued_s"] == [0.1, 0.1, 0.1]
        assert health["attempts"]["decided"] == STORED
        timeline = health["timeline"]
        assert timeline["gauges"]["rollouts_running"] == [2]
        (phase,) = timeline["phases"]
        assert (phase["phase"], phase["step"]) == ("collect", 1)
        assert phase["began_s"] <= timeline["gauges"]["time_s"][0] <= phase["ended_s"]
        cheats = await client.json("/api/lab/cheats")
        counts = {kind["evidence"]: kind["n"] for kind in cheats["kinds"]}
        assert counts["tampered"] == 3
        assert counts["network attempts"] == 3
        assert cheats["alarms"]["tamper_alarm"] == [2]
        config = await client.json("/api/lab/config")
        keys = {f"{t['table']}.{k['key']}": k for t in config["tables"] for k in t["keys"]}
        assert (keys["run.steps"]["value"], keys["run.steps"]["changed"]) == (STEPS, True)


async def test_compare_counts_tasks_of_two_sides(lab_run: Path) -> None:
    async with viewing(lab_run) as client:
        sides = {"of_a": "eval_before:0", "of_b": f"eval_after:{STEPS}"}
        found = await client.json("/api/compare", runs="lab", **sides)
        assert found["table"] == {"both": 0, "only_a": 1, "only_b": 2, "neither": 1}
        assert found["p"] == 1.0
        runs = await client.json("/api/compare", runs="lab,lab")
        assert runs["differences"] == []
        both = await client.json("/api/compare", runs="lab", id_a=ONE, id_b="train/00002/000/01")
        assert both["shared_turns"] == 2
        await client.json("/api/compare", 400, runs="lab", of_a="nonsense", of_b="x:1")


async def test_hostile_text_goes_through_unchanged(hostile_run: Path) -> None:
    async with viewing(hostile_run) as client:
        name = "/api/%3Cimg%20src=x%20onerror=alert(1)%3E/"
        for page in OF_RUN:
            await client.json(name + page)
        for page in OF_ROLLOUT:
            await client.json(name + page, id=ONE)
        task = (await client.json(name + "rollout", id=ONE))["row"]["task"]
        await client.json(name + "task", task=task)
        await client.json(name + "group", phase="train", step=2, group=0)
        shown = await client.json(name + "transcript", id=ONE)
        prompt = shown["turns"][0]["messages"][1]["text"]
        assert all(text.replace("\x00", "") in prompt for text in CORPUS)
        status, body, _ = await client.get(name + "tokens", id=ONE)
        assert status == 200
        assert CORPUS[0] in decode_tokens(body)["text"]


async def test_a_run_that_begins_and_grows(lab_run: Path, tmp_path: Path) -> None:
    from insitu.config import load_config

    config = load_config(tables={"run": {"dir": str(tmp_path / "young")}})
    async with viewing(lab_run) as _:
        pass
    with RunDir.create(config) as run:
        async with viewing(tmp_path) as client:
            runs = (await client.json("/api/runs"))["runs"]
            assert [(r["state"], r["problem"]) for r in runs] == [("running", "no rollouts yet")]
            assert (await client.json("/api/young/overview"))["empty"]
            await client.json("/api/young/rollouts", 404)
            async with asyncio.timeout(20):
                await _grows(client, run)


async def _grows(client: Client, run: RunDir) -> None:
    headers = {"Authorization": f"Bearer {client.viewer.token}"}
    async with client.session.get(f"{client.origin}/api/young/events", headers=headers) as events:
        first = await events.content.readline()
        assert orjson.loads(first.removeprefix(b"data: "))["rollouts"] is None
        with run.store() as store:
            store.put_rollout("train", 1, 0, 0, make_rollout(Flavour(), "train", 1, 0, 0, True))
            while True:
                line = await events.content.readline()
                if line.startswith(b"data: ") and orjson.loads(line[6:])["rollouts"]:
                    break
            page = await client.json("/api/young/rollouts")
            assert [row["id"] for row in page["rows"]] == ["train/00001/000/00"]


@pytest.mark.parametrize("damage", ["cut", "empty", "text", "schema", "killed"])
async def test_damaged_stores_are_named_in_one_line(lab_run: Path, tmp_path: Path, damage: str) -> None:
    copy = tmp_path / "broken"
    shutil.copytree(lab_run, copy)
    store = copy / "run.sqlite"
    if damage == "cut":
        os.truncate(store, store.stat().st_size // 2)
    elif damage in ("empty", "text"):
        store.write_bytes(b"" if damage == "empty" else b"not a database" * 200)
    elif damage == "schema":
        with Store(store) as opened:
            opened.set_meta("schema_version", "1")
    elif damage == "killed":  # a log without its index, as after kill -9 and a copy
        (copy / "run.sqlite-wal").write_bytes(b"")
    async with viewing(tmp_path) as client:
        runs = (await client.json("/api/runs"))["runs"]
        assert len(runs) == 1
        status, body, _ = await client.get("/api/broken/rollouts")
        assert status in ((200,) if damage == "killed" else (200, 404)), body
        if status == 404:
            assert str(tmp_path) not in body.decode()
            assert runs[0]["problem"]


async def test_a_run_of_an_earlier_schema_shows_what_it_has(lab_run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "lab"
    shutil.copytree(lab_run, copy)
    make_old(copy / "run.sqlite")
    async with viewing(copy) as client, viewing(lab_run) as newer:
        for page in OF_RUN:
            await client.json(f"/api/lab/{page}")
        for page in OF_ROLLOUT:
            await client.json(f"/api/lab/{page}", id=ONE, segment=0)
        listed, wanted = [await c.json("/api/lab/rollouts", sort="-calls") for c in (client, newer)]
        for row, other in zip(listed["rows"], wanted["rows"], strict=True):
            assert (row["id"], row["calls"], row["ended_s"]) == (
                other["id"],
                other["calls"],
                other["ended_s"],
            )
        found = await client.json("/api/lab/rollout", id=ONE)
        assert (found["waits"], found["has"]["times"], found["verdict"]["evidence"]) == (None, False, None)
        assert found["credit"]["proof"] == "identical"
        text = await client.json("/api/lab/transcript", id=ONE)
        assert [message["role"] for message in text["turns"][0]["messages"]] == ["system", "user"]
        assert (await client.json("/api/lab/diff", id=ONE))["diff"] is None


async def test_a_copied_run_shows_text_without_its_model(lab_run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "lab"
    shutil.copytree(lab_run, copy)
    text = (copy / "config.toml").read_text()
    (copy / "config.toml").write_text(re.sub(r'\[model\]\npath = ""', '[model]\npath = "/gone"', text))
    assert 'path = "/gone"' in (copy / "config.toml").read_text()
    async with viewing(copy) as client:
        found = await client.json("/api/lab/transcript", id=ONE)
        assert found["turns"][2]["reply"]["text"]["text"] == "done"
        shutil.rmtree(copy / "tokenizer")
    async with viewing(copy) as client:
        found = await client.json("/api/lab/transcript", id=ONE)
        assert "it has no tokenizer.json" in found["problem"]


async def test_links_inside_a_run_are_not_followed(lab_run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "linked"
    shutil.copytree(lab_run, copy)
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    name = ONE.replace("/", "-")
    (copy / "logs" / f"{name}.log").unlink()
    (copy / "logs" / f"{name}.log").symlink_to(secret)
    (copy / "artifacts" / name / "1" / "link.txt").symlink_to(secret)
    async with viewing(copy) as client:
        assert (await client.json("/api/linked/log", id=ONE))["text"] is None
        paths = [file["path"] for file in (await client.json("/api/linked/artifacts", id=ONE))["artifacts"]]
        assert paths == ["1/work/notes.txt"]
        assert (await client.get("/api/linked/download", id=ONE, artifact="1/link.txt"))[0] == 404


async def test_an_overview_that_has_not_changed_is_not_sent_again(lab_run: Path) -> None:
    async with viewing(lab_run) as client:
        status, _, answer = await client.get("/api/lab/overview")
        headers = {"Authorization": f"Bearer {client.viewer.token}", "If-None-Match": answer.headers["ETag"]}
        async with client.session.get(f"{client.origin}/api/lab/overview", headers=headers) as again:
            assert (status, again.status, await again.read()) == (200, 304, b"")
        headers["If-None-Match"] = '"other"'
        async with client.session.get(f"{client.origin}/api/lab/overview", headers=headers) as again:
            assert (again.status, (await again.json())["run"]["name"]) == (200, "lab")


async def test_parts_of_held_out_tasks_are_the_evaluations(lab_run: Path) -> None:
    async with viewing(lab_run) as client:
        held = await client.json("/api/lab/tasks", phase="eval_after")
        assert held["parts"] == ["eval_before", "eval_after"]
        assert [task["parts"] for task in held["tasks"]] == [
            [[1, 1], [0, 1]], [[0, 1], [1, 1]], [[0, 1], [1, 1]], [[0, 1], [0, 1]],
        ]  # fmt: skip
        train = await client.json("/api/lab/tasks")
        assert train["tasks"][0]["parts"] == [[2, 4], [0, 0], [0, 0]]
        # Cells: place, group, rollouts, graded, solved.
        assert held["places"] == [{"phase": "eval_before", "step": 0}, {"phase": "eval_after", "step": STEPS}]
        assert held["tasks"][1]["cells"] == [[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
        assert [place["step"] for place in train["places"]] == [1, 2, 3]
        assert train["tasks"][-1]["cells"] == [[2, 3, 4, 4, 2]]


async def test_a_search_finds_what_agents_wrote_and_read(
    lab_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with viewing(lab_run) as client:
        prompt = await client.json("/api/lab/search", text="FIX shop.py")
        assert {match["where"] for match in prompt["matches"]} == {"prompt"}
        assert all(match["match"] == "Fix shop.py" for match in prompt["matches"])
        reply = (await client.json("/api/lab/search", text="looked"))["matches"][0]
        turns = (await client.json("/api/lab/transcript", id=reply["id"]))["turns"]
        assert reply["where"] == "reply"
        assert "looked" in next(t for t in turns if t["turn"] == reply["turn"])["reply"]["text"]["text"]
        whole = await client.json("/api/lab/search", text="nowhere to be found")
        assert (whole["matches"], whole["next"], whole["problem"]) == ([], None, "")

        monkeypatch.setattr(search, "MAX_MATCHES", 3)
        monkeypatch.setattr(search, "TURNS", 7)
        searched, found, before = 0, [], "9" * 15
        while before:
            part = await client.json("/api/lab/search", text="looked", before=before)
            searched += part["searched"]
            found += [(match["id"], match["turn"]) for match in part["matches"]]
            before = part["next"]
        assert searched == whole["searched"]
        assert len(found) == len(set(found)) > 3
