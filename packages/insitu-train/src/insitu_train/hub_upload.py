"""Upload of a folder to the Hugging Face Hub in one commit."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from typing import Literal

from insitu.backoff import retry
from insitu.errors import ConfigError, SetupError
from insitu_train.redaction import Redaction

HUB = re.compile(r"hub:([\w.-]+/[\w.-]+)")
ATTEMPTS, FIRST_S = 4, 1.0


async def upload(
    folder: Path,
    repo: str,
    kind: Literal["model", "dataset"],
    redaction: Redaction,
    message: str = "Upload by insitu push",
    *,
    public: bool = False,
    mirror: bool = False,
) -> str:
    """Make the repository, upload in one commit and return the address; retry while the Hub is busy.

    Private unless `public`. `mirror`: the commit also deletes what the folder does not have.
    Raises ConfigError, SetupError.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))

    def busy(error: Exception) -> bool:
        if isinstance(error, HfHubHTTPError):
            return error.response.status_code == 429 or error.response.status_code >= 500
        # RuntimeError: of the upload of one large file.
        return isinstance(error, OSError | RuntimeError)

    async def create() -> str:
        made = await asyncio.to_thread(
            api.create_repo, repo, repo_type=kind, private=not public, exist_ok=True
        )
        # One that exists keeps its visibility.
        info = await asyncio.to_thread(api.repo_info, repo, repo_type=kind)
        if not public and info.private is False:
            raise ConfigError(f"{repo} exists and is public: --public uploads there")
        return str(made)

    async def commit() -> None:
        await asyncio.to_thread(
            api.upload_folder,
            repo_id=repo,
            folder_path=folder,
            repo_type=kind,
            commit_message=message,
            delete_patterns="*" if mirror else None,
        )

    try:
        url = await retry(create, busy, attempts=ATTEMPTS, first_s=FIRST_S, name="create")
        await retry(commit, busy, attempts=ATTEMPTS, first_s=FIRST_S, name="upload")
    except (HfHubHTTPError, OSError, RuntimeError, ValueError) as error:
        first = str(error).strip().partition("\n")[0] or type(error).__name__
        raise SetupError(f"cannot push to {repo}: {redaction.text(first)}") from error
    return url
