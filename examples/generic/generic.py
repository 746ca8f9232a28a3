"""Single-turn coding tasks: the three functions of torchforge's generic loop, for Python and Julia.

    insitu train examples/generic/python.toml
    insitu train examples/generic/julia.toml     (Julia where sandboxes see it, below /usr)

Another language is another row format in `transform_sample`; nothing else changes.
"""

import re

import insitu

MOST_CHARS = 5000
CODE = {"solution.py": r"\bdef |\breturn\b|\bimport ", "solution.jl": r"\bfunction\b|\bend\b|\) *="}
FENCE = re.compile(r"```\w*\n(.*?)(?:```|\Z)", re.DOTALL)


def transform_sample(row: dict) -> dict | None:
    """Return a row of the format unit_tests; None leaves out a sample without tests."""
    if not row.get("test_code"):
        return None
    file = "solution.jl" if row["language"] == "julia" else "solution.py"
    asked = f"{row['question']}\nAnswer with the {row['language']} code of {file} in one block."
    kept = {key: row[key] for key in ("task_id", "language", "test_code", "solution")}
    return {**kept, "prompt": asked}


def build_action(reply: str, task: insitu.Task) -> dict[str, str]:
    """Return the files that a reply makes; a reply that is no code fails the attempt."""
    file = task.grading.entry
    blocks = FENCE.findall(reply)
    code = blocks[-1] if blocks else reply
    if why := gibberish(code, CODE[file]):
        raise ValueError(why)
    return {file: code}


def evaluate_response(rollout: insitu.FinishedRollout) -> dict[str, float]:
    """Return the tests' result, a little for usable code, and a little against long replies."""
    sampled = sum(len(turn.ids) for turn in rollout.turns)
    return {
        "tests": rollout.verdict.reward or 0.0,
        "usable": 0.1 * bool(rollout.diff),
        "length": -0.1 * min(1.0, sampled / rollout.task.limits.max_call_tokens),
    }


def gibberish(code: str, marks: str) -> str:
    """Return why a text cannot be code; empty if it can."""
    special = sum(not (char.isalnum() or char.isspace()) for char in code)
    if len(code) > MOST_CHARS:
        return f"longer than {MOST_CHARS} characters"
    if sum(not char.isascii() for char in code) > 0.3 * len(code):
        return "mostly not ASCII"
    if special > 0.4 * len(code):
        return "mostly punctuation"
    if re.search(r"(.{1,20})\1{20}", code, re.DOTALL):
        return "the same text again and again"
    return "" if re.search(marks, code) else "no code"
