"""Turns a solution program (solve.sh) into a gold tree, by a run in a sandbox.

Changes outside of the work folder are lost, as for an agent.
"""

from __future__ import annotations

from dataclasses import replace

from insitu.errors import TaskError
from insitu.grading.diff import changes
from insitu.sandbox.base import SandboxBackend, SandboxSpec
from insitu.sandbox.base_tree import set_up
from insitu.types import Oracle, Task

SOLUTION_AT = "/solution"
MAX_BYTES, MAX_FILES = 512 << 20, 200_000


async def with_gold(backend: SandboxBackend, task: Task, oracle: Oracle) -> Oracle:
    """Return the oracle with the tree of its solve.sh, where it has no other gold.

    Raises TaskError when the program fails, SandboxError.
    """
    if oracle.gold or oracle.gold_patch or not oracle.solve:
        return oracle
    spec = SandboxSpec(
        image=task.setup.image,
        workdir=task.setup.workdir,
        root_setup=bool(task.setup.root_commands),
        network="none",
        places=(SOLUTION_AT,),
        label=f"solve/{task.id}",
    )
    async with await backend.create(spec) as sandbox:
        await set_up(sandbox, task.setup)
        if task.files:
            await sandbox.lay(task.files)
        before = await sandbox.get_tree(max_bytes=MAX_BYTES, max_files=MAX_FILES)
        for path, entry in oracle.solve.items():
            executable = entry.executable or path == "solve.sh"
            await sandbox.put(f"{SOLUTION_AT}/{path}", entry.content, executable=executable)
        # By its shebang; bash runs a script without one.
        argv = ["bash", "-c", f"exec {SOLUTION_AT}/solve.sh"]
        done = await sandbox.exec(argv, timeout_s=task.limits.wall_s, env=oracle.solve_env)
        if done.exit_code != 0:
            how = "took too long" if done.timed_out else f"ended with {done.exit_code}"
            raise TaskError(f"task {task.id}: the solution {how}")
        await sandbox.kill_all()
        after = await sandbox.get_tree(max_bytes=MAX_BYTES, max_files=MAX_FILES)
    changed, deleted = changes(before, after)
    if deleted and not changed:
        raise TaskError(f"task {task.id}: the solution only deletes files, which a gold tree cannot express")
    return replace(oracle, gold=changed)
