"""What single recipes get right, without their agents; and the agents themselves where they are installed."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import orjson
import pytest
from scripted_server import ScriptedServer, play

from insitu.agents import gemini_cli, mini_swe, qwen_code
from insitu.agents.base import AgentResult, ModelAccess
from insitu.agents.harness import RecipeHarness
from insitu.agents.install import find
from insitu.agents.recipe import Recipe, Start
from insitu.sandbox.base import ExecResult
from insitu.sandbox.local import LocalBackend
from insitu.types import Task

ACCESS = ModelAccess(
    public_id="pub", secret="secret-of-rollout", max_call_tokens=2048, max_context_tokens=48_000
)


def start(context_tokens: int) -> Start:
    return Start(
        address="http://127.0.0.1:8080/s/pub",
        api_key="secret-of-rollout",
        model="policy",
        prompt="--help me",
        max_call_tokens=2048,
        context_tokens=context_tokens,
    )


def settings(recipe: Recipe, context_tokens: int) -> dict[str, Any]:
    ((_, content, _),) = recipe.home_files(start(context_tokens))
    return dict(orjson.loads(content))


@pytest.mark.parametrize("context_tokens", [4096, 16_384, 33_000, 48_000, 262_144])
def test_compaction_starts_where_the_policy_counts(context_tokens: int) -> None:
    """By the agents' own rules, which are written out here."""
    wanted = start(context_tokens).compact_tokens
    qwen = settings(qwen_code.RECIPE, context_tokens)
    window = qwen["model"]["generationConfig"]["contextWindowSize"]
    share = qwen["context"]["autoCompactThreshold"] * window
    assert min(share, window - 20_000 - 13_000) == pytest.approx(wanted)
    gemini = settings(gemini_cli.RECIPE, context_tokens)
    assert gemini["model"]["compressionThreshold"] * 1_048_576 == pytest.approx(wanted)


@pytest.mark.parametrize("module", [gemini_cli, mini_swe, qwen_code])
def test_a_prompt_that_looks_like_a_switch_is_still_the_prompt(module: ModuleType) -> None:
    recipe: Recipe = module.RECIPE
    argv = [start(48_000).fill(word) for word in recipe.command]
    assert [part for part in argv if part.endswith("=--help me")]
    assert "--help me" not in argv
    assert recipe.stdin(start(48_000)) == b""


@pytest.mark.parametrize(
    ("code", "said", "outcome", "detail"),
    [
        (0, "Exit:\n\nSaved trajectory to 'x'", "finished", ""),
        (0, "Tool:\nExit:\nRepeatedFormatError\nSaved", "failed", "gave up: RepeatedFormatError"),
        (0, "Exit:\nLimitsExceeded", "failed", "gave up: LimitsExceeded"),
        (0, "the model wrote RepeatedFormatError\nExit:\n\nSaved", "finished", ""),
        (1, "litellm.ContextWindowExceededError: too long", "failed", "exit code 1: litellm.Con"),
    ],
)
def test_mini_swe_does_not_take_giving_up_for_an_end(code: int, said: str, outcome: str, detail: str) -> None:
    result = ExecResult(exit_code=code, stdout=said.encode(), stderr=b"")
    found = mini_swe.RECIPE.rule(result)
    assert found[0] == outcome
    assert found[1].startswith(detail)
    assert bool(found[1]) == bool(detail)


async def run(recipe: Recipe, backend: LocalBackend, server: ScriptedServer, task: Task) -> AgentResult:
    installed = find(recipe)
    if installed is None:
        pytest.skip(f"{recipe.name} is not installed: insitu install {recipe.name}")
    async with RecipeHarness(recipe, backend, installed=installed).worker(server.path) as worker:
        return await worker.run(task, ACCESS)


@pytest.mark.full
async def test_mini_swe_solves_and_shows_no_path_of_its_own(
    backend: LocalBackend, server: ScriptedServer, task: Task
) -> None:
    look = "python3 -c 'import sys; print(sys.path)'; env"
    server.script = play(
        [
            ("bash", {"command": look}),
            ("bash", {"command": "sed -i 's/+/*/' app.py && python3 check.py"}),
            ("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}),
        ]
    )
    result = await run(mini_swe.RECIPE, backend, server, task)
    assert (result.exit, result.detail) == ("finished", "")
    assert result.tree["app.py"].content == b"def f(a, b):\n    return a * b\n"
    assert "/opt/agent" not in server.requests[1]["messages"][-1]["content"]
    assert server.paths == ["/s/pub/v1/chat/completions"] * 3


@pytest.mark.full
async def test_mini_swe_gives_up_after_three_replies_without_a_call(
    backend: LocalBackend, server: ScriptedServer, task: Task
) -> None:
    server.script = play(["I would rather talk."])
    result = await run(mini_swe.RECIPE, backend, server, task)
    assert (result.exit, result.detail) == ("failed", "gave up: RepeatedFormatError")
    assert len(server.requests) == 3
    assert not [m for m in server.requests[-1]["messages"] if m["role"] == "assistant"]


@pytest.mark.full
async def test_qwen_code_solves_and_keeps_to_its_files(
    backend: LocalBackend, server: ScriptedServer, task: Task
) -> None:
    edit = {"file_path": "/work/app.py", "old_string": "a + b", "new_string": "a * b"}
    server.script = play(
        [
            ("read_file", {"file_path": "/work/app.py"}),
            ("edit", edit),
            ("run_shell_command", {"command": "python3 check.py", "is_background": False}),
            "Done.",
        ]
    )
    result = await run(qwen_code.RECIPE, backend, server, task)
    assert (result.exit, result.detail) == ("finished", "")
    assert dict(result.tree).keys() == dict(task.files).keys()
    assert result.tree["app.py"].content == b"def f(a, b):\n    return a * b\n"
    assert len(server.requests) == 4
    assert server.requests[0]["max_tokens"] == ACCESS.max_call_tokens
    assert server.requests[0]["messages"][-1]["content"][-1]["text"] == task.prompt


@pytest.mark.parametrize("recipe", [mini_swe.RECIPE, qwen_code.RECIPE], ids=lambda r: r.name)
@pytest.mark.full
async def test_a_refusing_model_ends_the_run(
    recipe: Recipe, backend: LocalBackend, server: ScriptedServer, task: Task
) -> None:
    server.script = lambda _turn, _messages: None
    result = await run(recipe, backend, server, task)
    assert result.exit == "failed"
    assert len(server.requests) < 8
