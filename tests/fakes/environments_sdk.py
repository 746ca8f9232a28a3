"""Stand-ins for the parts of verifiers 0.4 and OpenEnv 0.10 that `insitu.tasks` uses."""

from __future__ import annotations

import importlib
import inspect
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType, SimpleNamespace
from typing import Any, Self

from pydantic import BaseModel, ConfigDict

# --------------------------------------------------------------------------- verifiers.v1


class TaskTimeout(BaseModel):
    agent: float | None = None


class TaskData(BaseModel):
    model_config = ConfigDict(frozen=True)

    idx: int | None = None
    id: str | None = None
    name: str | None = None
    prompt: str | None = None
    image: str | None = None
    system_prompt: str | None = None
    timeout: TaskTimeout = TaskTimeout()

    @property
    def prompt_text(self) -> str:
        return self.prompt or ""


class TaskConfig(BaseModel):
    pass


class TasksetConfig(BaseModel):
    id: str = ""
    task: TaskConfig = TaskConfig()


@dataclass
class Trace:
    task: Any
    agent: Any
    nodes: list[Any]
    is_completed: bool
    ok: bool
    rewards: dict[str, Any] = field(default_factory=dict)

    @property
    def last_reply(self) -> str:
        return str([node.message.content for node in self.nodes if node.sampled][-1]).strip()


class Task:
    key, hash = "key", "hash"

    def __init__(self, data: Any, config: TaskConfig) -> None:
        self.data, self.config = data, config

    def __class_getitem__(cls, item: object) -> type:
        return cls

    @classmethod
    def toolsets(cls, config: object) -> list[object]:
        return []

    def plugged_judges(self) -> list[Any]:
        return []

    def hooks(self, attr: str) -> list[Any]:
        names = [name for name in dir(type(self)) if hasattr(getattr(type(self), name), attr)]
        return [getattr(self, name) for name in names]

    async def setup(self, trace: Any, runtime: Any) -> None: ...

    async def finalize(self, trace: Any, runtime: Any) -> None: ...

    async def stage_verifier(self, trace: Any, runtime: Any) -> None: ...

    async def score(self, trace: Trace) -> None:
        known = {"task": self.data, "trace": trace}
        for function in self.hooks("reward"):
            wanted = inspect.signature(function).parameters
            score = await function(**{name: known[name] for name in wanted})
            trace.rewards[function.__name__] = SimpleNamespace(value=score * function._vf_weight)


class Taskset:
    bounded = True

    def __init__(self, config: TasksetConfig) -> None:
        self.config = config

    def __class_getitem__(cls, item: object) -> type:
        return cls

    @classmethod
    def toolsets(cls, config: object) -> list[object]:
        return []

    def load(self) -> Iterator[Any]:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        for idx, task in enumerate(self.load()):
            task.data = task.data.model_copy(update={"idx": idx})
            yield task


def reward(function: Any = None, weight: float = 1.0) -> Any:
    def mark(marked: Callable[..., Any]) -> Callable[..., Any]:
        vars(marked).update(reward=True, _vf_weight=weight)
        return marked

    return mark if function is None else mark(function)


def load_taskset(config: TasksetConfig) -> Taskset:
    module = importlib.import_module(config.id)
    made: Taskset = getattr(module, module.__all__[0])(config)
    return made


def verifiers_sdk() -> dict[str, ModuleType]:
    """Modules to put into `sys.modules`."""
    package, module = ModuleType("verifiers"), ModuleType("verifiers.v1")
    kinds = (TaskData, Task, Taskset, Trace, reward, load_taskset)
    vars(module).update({kind.__name__: kind for kind in kinds})
    for name in ("TraceTask", "AgentInfo", "AgentConfig", "UserMessage", "AssistantMessage"):
        setattr(module, name, SimpleNamespace)
    module.MessageNode = lambda **keys: SimpleNamespace(**{"sampled": False, **keys})  # type: ignore[attr-defined]
    module.SingleAgentEnv = object  # type: ignore[attr-defined]
    module.environment_class = lambda id: object  # type: ignore[attr-defined]
    module.taskset_config_type = lambda id: TasksetConfig  # type: ignore[attr-defined]
    package.v1 = module  # type: ignore[attr-defined]
    return {"verifiers": package, "verifiers.v1": module}


# --------------------------------------------------------------------------- openenv: the environment Guess

SCHEMA = {"title": "GuessAction", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
ROUTES: dict[str, Any] = {
    "/schema": {"action": SCHEMA},
    "/list_environments": ["guess"],
    "/guess/splits": [{"name": "train", "type": "train"}],
    "/guess/num_tasks": {"num_tasks": 3},
}


class GenericEnvClient:
    def __init__(self, base_url: str) -> None:
        self.wanted = -1

    def sync(self) -> Any:
        return SyncClient(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    def begin(self, split: str, index: int) -> Any:
        self.wanted = 4 * index
        return SimpleNamespace(observation={"hint": "between 0 and 9"}, reward=None, done=False)

    async def reset(self, **keys: Any) -> Any:
        return self.begin(**keys)

    async def connect(self) -> None: ...

    async def close(self) -> None: ...

    async def step(self, action: Any) -> Any:
        if action.get("type") == "call_tool":
            observation = {"tool_name": action["tool_name"], "result": {"content": [{"text": "Higher."}]}}
            return SimpleNamespace(observation=observation, reward=-0.1, done=False)
        if not isinstance(action.get("number"), int):
            raise RuntimeError("Server error: Invalid message (code: VALIDATION_ERROR)")
        right = action["number"] == self.wanted
        return SimpleNamespace(observation={"hint": ""}, reward=right - 0.1, done=right)


class SyncClient:
    def __init__(self, client: GenericEnvClient) -> None:
        self._client = client

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def reset(self, **keys: Any) -> Any:
        return self._client.begin(**keys)

    def step(self, action: Any) -> Any:
        assert action == {"type": "list_tools"}
        tool = {"name": "guess", "description": "Guess.", "input_schema": {"type": "object"}}
        return SimpleNamespace(observation={"tools": [tool]})


def openenv_sdk() -> dict[str, ModuleType]:
    """Modules to put into `sys.modules`."""
    module = ModuleType("openenv")
    module.GenericEnvClient = GenericEnvClient  # type: ignore[attr-defined]
    return {"openenv": module}


@contextmanager
def serve_guess() -> Iterator[str]:
    """Serve what OpenEnv serves over HTTP; steps go through the client."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = ROUTES.get(self.path)
            body = json.dumps(found).encode()
            self.send_response(501 if found is None else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
