"""Worker extension for vLLM 0.26, which has no route for tensor checksums and weight labels.

Runs inside the server, which is started with this package on its PYTHONPATH and `--worker-extension-cls
insitu.engines.vllm_worker.InsituWorker`; called through its route /collective_rpc. Imports nothing but torch.
The checksums are those of vLLM 0.32.
"""

from __future__ import annotations

import hashlib
from typing import Any


class InsituWorker:
    """Mixed into vLLM's own worker class."""

    insitu_label = "default"
    """Of the weights that a server was started with, as in vLLM 0.32."""

    def insitu_weights(self, with_sums: str = "") -> dict[str, Any]:
        """Return the label and, unless `with_sums` is empty, the SHA-256 of every parameter's bytes."""
        worker: Any = self
        found: dict[str, Any] = {"label": self.insitu_label, "rank": int(worker.rank)}
        if with_sums:
            model = worker.model_runner.get_model()
            found["sums"] = {name: _sum(p) for name, p in model.named_parameters()}
        return found

    def insitu_set_label(self, label: str) -> None:
        """Label the current weights."""
        self.insitu_label = label


def _sum(parameter: Any) -> str:
    import torch

    held = parameter.detach().contiguous().reshape(-1).cpu()
    return hashlib.sha256(held.view(torch.uint8).numpy().data if held.numel() else b"").hexdigest()
