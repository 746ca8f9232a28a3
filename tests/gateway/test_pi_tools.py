"""Host tools inside the real Pi: the extension registers them, Pi calls them, the operator has the calls."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from gateway_rig import Rig, call, said
from test_host_tools import SUBMIT, ToolRig

from insitu.agents.install import Installed, find, find_node, install
from insitu.agents.pi import PI_TOOLS, RECIPE
from insitu.chat.template import TemplateRenderer
from insitu.serving.agent_setup import Access, setup
from insitu.types import Message

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def pi() -> Installed:
    if os.environ.get("INSITU_REQUIRE_PI") == "1":
        return install(RECIPE)
    found = find(RECIPE)
    if found is None:
        pytest.skip("Pi is not installed: insitu install pi (or set INSITU_REQUIRE_PI=1)")
    return found


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


async def run_pi(pi: Installed, rig: ToolRig, home: Path) -> tuple[int, str]:
    """(exit code, output) of Pi, started as `insitu serve` says."""
    access = Access(
        address=f"{rig.origin}/s/{rig.session.public_id}",
        secret=rig.session.secret,
        model="policy",
        max_call_tokens=512,
        context_tokens=100_000,
        home=str(home),
        tools_url=rig.tool_url,
        tool_secret=rig.session.tool_secret,
    )
    way = setup("pi", access, prompt="Hand in 42.")
    for path, text in way.files.items():
        write(Path(path), text)
    assert pi.folder is not None
    program = [str(find_node()), str(pi.folder / "node_modules/.bin/pi")]
    work = home / "work"
    work.mkdir()
    process = await asyncio.create_subprocess_exec(
        *program,
        *way.command[1:],
        "--no-session",
        cwd=work,
        env={"PATH": os.environ["PATH"], "HOME": str(home), "PI_OFFLINE": "1", **way.env},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        out, _ = await asyncio.wait_for(process.communicate(), 90)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode or 0, out.decode()


async def test_pi_calls_a_host_tool(renderer: TemplateRenderer, pi: Installed, tmp_path: Path) -> None:
    script = [
        Message(role="assistant", tool_calls=(call("submit", '{"answer": "42", "sure": true}'),)),
        # Pi's own check lets this pass; the schema's does not.
        Message(role="assistant", tool_calls=(call("submit", '{"answer": "' + "4" * 30 + '"}'),)),
        Message(role="assistant", tool_calls=(call("bash", '{"command": "echo key=[$INSITU_TOOLS_KEY]"}'),)),
        said("All done."),
    ]
    async with ToolRig(renderer, script) as rig:
        code, output = await run_pi(pi, rig, tmp_path)
        assert code == 0, output
        assert "All done." in output
        calls = rig.session.tools.calls
        assert (calls[0].name, calls[0].source) == ("submit", "agent")
        assert calls[0].error == ""
        prompts = [renderer.decode(sent.ids) for sent in rig.engine.sent]
        assert len(prompts) == 4
        # Pi offers the tools itself: nothing is injected a second time.
        assert prompts[0].count(SUBMIT.description) == 1
        assert '{"ok":true}' in prompts[1]
        assert "submit" in prompts[2].rsplit("<tool_response>", 1)[0]
        assert '"ok":true' not in prompts[2].rsplit("<tool_response>", 1)[1]
        assert "key=[]" in prompts[3]
        trajectory = await rig.session.seal(1.0)
        assert trajectory.ledger.trained == trajectory.ledger.captured
        assert len(trajectory.segments) == 1


async def test_pi_without_the_address_goes_on_without_tools(
    renderer: TemplateRenderer, pi: Installed, tmp_path: Path
) -> None:
    assert PI_TOOLS.is_file()
    async with Rig(renderer, [said("Hello.")]) as plain:
        rig = ToolRig(renderer, [said("Hello.")])
        rig.session, rig.origin, rig.engine = plain.session, plain.origin, plain.engine
        rig.tool_url = ""
        code, output = await run_pi(pi, rig, tmp_path)
        assert (code, "Hello." in output) == (0, True), output
