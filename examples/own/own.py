"""Your own tasks, reward and agent train a model.

Start it from the folder of the repository in one of two ways:

    python examples/own/own.py            everything from this file; takes overrides, e.g. run.steps=4
    insitu train examples/own/own.toml    the same as a configuration
"""

import sys
from pathlib import Path

import insitu

HERE = Path(__file__).parent


def task(name: str, meaning: str, wrong: str, cases: list[tuple[int, int, int]]) -> dict[str, object]:
    """Return a row of the format jsonl: files, hidden cases, and no word of the solution."""
    source = f"def {name}(a, b):\n    # returns {meaning}\n    return {wrong}\n"
    return {
        "id": name,
        "prompt": f"{name} in {name}.py is wrong. Fix it.",
        "files": {f"{name}.py": source},
        "entry": f"{name}.py",
        "cases": [{"function": name, "args": [a, b], "expected": value} for a, b, value in cases],
    }


TASKS = [
    task("area", "a times b", "a + b", [(2, 3, 6), (4, 5, 20)]),
    task("total", "a plus b", "a - b", [(2, 3, 5), (4, 5, 9)]),
    task("change", "a minus b", "b - a", [(5, 3, 2), (9, 5, 4)]),
    task("margin", "the smaller of a and b", "max(a, b)", [(2, 3, 2), (7, 5, 5)]),
    task("quota", "a divided by b", "a * b", [(6, 3, 2), (9, 4, 2)]),
]


async def reward(rollout: insitu.FinishedRollout) -> dict[str, float]:
    """Score hidden cases, and a little for a short transcript."""
    return {
        "solved": rollout.verdict.reward or 0.0,
        "short": -0.1 * min(1.0, len(rollout.transcript) / 10_000),
    }


if __name__ == "__main__":
    run = insitu.train(
        run={"steps": 2},
        eval={"count": 0},
        tasks={"source": TASKS, "eval_share": 0.0},
        reward={"function": reward},
        harness={
            "command": ["python3", "{files}/agent.py"],
            "files": [str(HERE / "agent.py")],
            "pip": ["openai==3.54.0"],
            "workers": 4,
        },
        collect={"groups_per_step": 2, "group_size": 4},
        limits={"max_calls": 4},
        overrides=sys.argv[1:],
    )
    for step in run.steps:
        print(step.step, step.metrics["reward_mean"], step.ledger.trained)
