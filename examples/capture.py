"""insitu's core as a capture gateway under a trainer of your own; no torch, no other package of insitu.

    python examples/capture.py http://127.0.0.1:8000 MODEL_FOLDER -- my-agent --some flag

The agent gets OPENAI_BASE_URL, ANTHROPIC_BASE_URL and a key; its exit status is the reward here.
"""

import os
import subprocess
import sys

import insitu

vllm, model, _, *agent = sys.argv[1:]
with insitu.serve(model={"path": model}, engine={"kind": "vllm", "urls": [vllm]}) as server:
    for _ in range(4):  # one group: rollouts of the same task
        session = server.session(task="hello")
        where = {"OPENAI_BASE_URL": session.openai_url, "ANTHROPIC_BASE_URL": session.anthropic_url}
        keys = {"OPENAI_API_KEY": session.key, "ANTHROPIC_API_KEY": session.key}
        status = subprocess.run(agent, env={**os.environ, **where, **keys}).returncode
        session.seal(reward=1.0 if status == 0 else 0.0)
        for row in session.rows():  # numpy: what your trainer's forward pass and loss need
            print(len(row.ids), row.mask.sum(), row.logprobs[row.mask].sum(), row.versions.max())
