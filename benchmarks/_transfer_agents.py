"""The agents of the transfer benchmark: one plan of the demonstrator, spelled in the tools of each.

`spelled` turns the demo's plan, made for Pi's tools, into an agent's turns; `rendered` is a demonstration
inside an agent without running it. Both are pure. What the agents answer was seen on the wire, and
`_transfer_warm` compares renderings with recordings through the real agents before it trains on them.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from insitu.chat.renderer import ChatRenderer
from insitu.tasks.toy import ToyProblem, check_output
from insitu.types import IntArray, Message, ToolCall
from insitu_train.demo.demonstrator import Habits, Step, call, plan_turns
from insitu_train.demo.rendered_demonstrations import Demonstration, SimulatedPiTools

CHECK = "python3 check.py"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
VOLATILE = re.compile(r"Chunk ID: [0-9a-f]+\nWall time: [0-9.]+ seconds")
"""Text that Codex makes up or measures for each command."""

Answer = Callable[[str, str, random.Random], str]
"""(command, its output, random stream) -> the text that the agent sends to the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spelling:
    """How an agent's model writes commands and ends, and how the agent answers."""

    command: Callable[[str], Message] | None = None
    """The turn that runs a command of the shell; None = Pi's tools read, bash and edit."""
    answer: Answer = lambda command, output, rng: output
    tool: bool = True
    """Answers are tool results; False: user messages."""
    ends: Sequence[Message] = (Message(role="assistant", text="done"),)
    closing: str = ""
    """What the agent answers to the first of two ending turns."""
    pieces: Sequence[str] = ()
    """Further tokens: fixed texts of the agent and of the model's commands, 12 characters or more."""


def _keys(command: str, *, done: bool = False) -> Message:
    commands = [{"keystrokes": f"{command}\n", "duration": 9}] if command else []
    return Message(role="assistant", text=json.dumps({"commands": commands, "task_complete": done}))


def _json_result(command: str, output: str, rng: random.Random) -> str:
    text = json.dumps({"returncode": 0, "output": output}, indent=2)
    # its template writes JSON that is safe inside HTML
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("'", "\\u0027")


def _screen(command: str, output: str, rng: random.Random) -> str:
    typed = f"/work$ {command}\n" if command else ""
    return f"New terminal output:\n{typed}{output}/work$"


def _chunk(command: str, output: str, rng: random.Random) -> str:
    head = f"Chunk ID: {rng.randrange(16**6):06x}\nWall time: {rng.choice((0.0, 0.05)):.4f} seconds\n"
    head += f"Process exited with code 0\nOriginal token count: {-(-len(output) // 4)}\n"
    return f"{head}Output:\n{output}"


_SURE = (
    "You said that the task is complete. Nothing can be changed after that. If you are sure, answer with",
    '"task_complete": true again; else go on.',
)
_SED = '": "sed -i \'s|'
SPELLINGS: Mapping[str, Spelling] = {
    "pi": Spelling(),
    "script": Spelling(),
    "mini_swe": Spelling(
        command=lambda text: call("bash", command=text),
        answer=_json_result,
        ends=(call("bash", command=SUBMIT),),
        pieces=(
            *(_SED, f'": "{SUBMIT}"}}}}', '"returncode": 0,', "Tool call error:"),
            "No tool calls found in the response. Every response MUST include at least one tool call.",
            "Here is general guidance on how to submit correct toolcalls:",
            "Every response needs to use the 'bash' tool at least once to execute commands.",
            "Call the bash tool with your command as the argument:",
            "If you want to end the task, please issue the following command: ",
            "without any other command.",
        ),
    ),
    "terminus": Spelling(
        command=_keys,
        answer=_screen,
        tool=False,
        ends=(_keys("", done=True), _keys("", done=True)),
        closing=f"New terminal output:\n/work$\n\n{_SURE[0]}\n{_SURE[1]}",
        pieces=(
            *(_SED, '{"commands": [{"keystrokes', '\\n", "duration": 9}], "task_complete": false}'),
            *('{"commands": [], "task_complete": true}', "New terminal output:", "/work$ sed -i 's|", *_SURE),
            "This reply cannot be used: ",
            "Answer with one JSON object as described.",
        ),
    ),
    "codex": Spelling(
        command=lambda text: call("exec_command", cmd=text),
        answer=_chunk,
        pieces=(
            *(_SED, '{"name": "exec_command", "arguments": {"cmd', "Wall time: 0.0000 seconds"),
            *("Process exited with code ", "Original token count: ", " seconds\nProcess"),
        ),
    ),
}  # fmt: skip


def _substitute(problem: ToyProblem, old: str, new: str) -> str:
    """Return the command that edits; `*` is the only special character of the toy tasks' expressions."""
    return f"sed -i 's|{old.replace('*', chr(92) + '*')}|{new}|' {problem.path}"


def _as_command(problem: ToyProblem, made: ToolCall) -> str:
    if made.name == "read":
        return f"cat {problem.path}"
    if made.name == "bash":
        return CHECK
    edited = json.loads(made.arguments)["edits"][0]
    return _substitute(problem, edited["oldText"], edited["newText"])


def spelled(agent: str, problem: ToyProblem, habits: Habits, seed: int) -> Sequence[Step]:
    """Return the turns of one demonstration inside an agent.

    A shell does not say that sed replaced nothing, so the turns after a refused edit are left out there.
    """
    spelling, steps = SPELLINGS[agent], plan_turns(problem, habits, seed)
    if spelling.command is None:
        return steps
    turns = [
        Step(message=spelling.command(_as_command(problem, step.message.tool_calls[0])))
        for step in steps
        if step.after != "refused" and step.message.tool_calls
    ]
    return [*turns, *(Step(message=message) for message in spelling.ends)]


class SimulatedShell:
    """Work folder of one problem: the output of the demonstrator's commands on it."""

    def __init__(self, problem: ToyProblem) -> None:
        self._problem = problem
        self.text = problem.text(solved=False)

    def run(self, command: str) -> str:
        if command == CHECK:
            return check_output(self._problem, self.text)
        if command == f"cat {self._problem.path}":
            return self.text
        _, old, new, _ = command.split("|")
        lines = (line.replace(old.replace("\\*", "*"), new, 1) for line in self.text.split("\n"))
        self.text = "\n".join(lines)
        return ""


def command_of(message: Message) -> str:
    """Return the command of a turn that `Spelling.command` made; empty for an ending turn."""
    if not message.tool_calls:
        commands = json.loads(message.text)["commands"]
        return str(commands[0]["keystrokes"]).rstrip("\n") if commands else ""
    arguments = json.loads(message.tool_calls[0].arguments)
    return str(arguments.get("cmd") or arguments["command"])


Turns = Iterator[tuple[Message, Message | None]]
"""(turn, what the agent answers); the last turn has no answer."""


def _with_pi_tools(problem: ToyProblem, steps: Sequence[Step]) -> Turns:
    tools, last = SimulatedPiTools(problem), ""
    for step in steps:
        if step.after not in ("any", last):
            continue
        if not step.message.tool_calls:
            yield step.message, None
            return
        text, outcome = tools.answer(step.message.tool_calls[0])
        last = outcome or last
        yield step.message, Message(role="tool", text=text, tool_call_id="rendered")


def _with_shell(spelling: Spelling, problem: ToyProblem, steps: Sequence[Step], seed: int) -> Turns:
    shell, rng = SimulatedShell(problem), random.Random(f"transfer-{problem.seed}-{seed}")
    *turns, last = [step.message for step in steps]
    for index, turn in enumerate(turns):
        if len(turns) - index < len(spelling.ends):
            text = spelling.closing
        else:
            command = command_of(turn)
            text = spelling.answer(command, shell.run(command), rng)
        answer = Message(role="tool", text=text, tool_call_id="rendered")
        yield turn, answer if spelling.tool else replace(answer, role="user", tool_call_id="")
    yield last, None


def conversation(agent: str, problem: ToyProblem, habits: Habits, seed: int) -> Turns:
    """Return the turns of one demonstration and the agent's answers."""
    spelling, steps = SPELLINGS[agent], spelled(agent, problem, habits, seed)
    if spelling.command is None:
        return _with_pi_tools(problem, steps)
    return _with_shell(spelling, problem, steps, seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """How an agent begins every conversation: constant tokens, then the task's prompt in a fixed text."""

    prefix: IntArray = field(repr=False)
    before: str
    after: str

    def of(self, problem: ToyProblem) -> str:
        return self.before + problem.prompt + self.after


def opening_of(renderer: ChatRenderer, prompt_ids: IntArray, prompt: str) -> Opening:
    """Return the opening of a first request, whose last user message must contain the task's prompt.

    Raises ValueError.
    """
    text = renderer.decode(prompt_ids)
    start = text.rindex("<|im_start|>user\n") + len("<|im_start|>user\n")
    before, found, after = text[start : text.index("<|im_end|>", start)].partition(prompt)
    if not found:
        raise ValueError("the first request does not contain the task's prompt in its last user message")
    tail = _prompt_ids(renderer, before + prompt + after)
    if not np.array_equal(prompt_ids[-len(tail) :], tail):
        raise ValueError("the last user message of the first request has other tokens than its text")
    return Opening(prefix=prompt_ids[: -len(tail)], before=before, after=after)


def _prompt_ids(renderer: ChatRenderer, text: str) -> IntArray:
    user = renderer.append([Message(role="user", text=text)])
    return np.concatenate([user, renderer.generation_prompt()])


def rendered(
    renderer: ChatRenderer, agent: str, opening: Opening, problem: ToyProblem, habits: Habits, seed: int
) -> Demonstration:
    """Return a demonstration after the opening's prefix, as the gateway would have recorded it."""
    spans: list[tuple[IntArray, bool]] = [(_prompt_ids(renderer, opening.of(problem)), False)]
    for message, answer in conversation(agent, problem, habits, seed):
        sampled = renderer.render_reply(message)
        spans.append((sampled, True))
        if answer is not None:
            closed = (
                renderer.close(sampled, "stop"),
                renderer.append([answer]),
                renderer.generation_prompt(),
            )
            spans += [(ids, False) for ids in closed]
    return Demonstration(
        task_id=f"toy-{problem.seed}",
        ids=np.concatenate([ids for ids, _ in spans]),
        mask=np.concatenate([np.full(len(ids), kept) for ids, kept in spans]),
    )
