"""Push this folder as a Docker Space, private unless --public: python push.py ORG/NAME.

--hardware NAME asks for hardware, which costs; --secrets sets the Space's secrets from the environment.
Needs huggingface_hub, and HF_TOKEN with the right to write.
"""

import argparse
import os
import sys
from pathlib import Path

from huggingface_hub import HfApi, SpaceHardware
from huggingface_hub.errors import HfHubHTTPError

SECRETS = [name for name in "@SECRETS@".split(", ") if name]


def push(name: str, *, public: bool, hardware: SpaceHardware | None, secrets: bool) -> str:
    """Return the address of the Space."""
    missing = [secret for secret in SECRETS if secrets and not os.environ.get(secret)]
    if missing:
        sys.exit(f"push: not set here: {', '.join(missing)}")
    api = HfApi()
    api.create_repo(name, repo_type="space", space_sdk="docker", private=not public, exist_ok=True)
    for secret in SECRETS if secrets else []:
        api.add_space_secret(name, secret, os.environ[secret])
    if hardware:
        api.request_space_hardware(name, hardware)
    folder = Path(__file__).resolve().parent
    left = ["push.py", "runs/**", ".env", "*.log", "__pycache__/**"]
    api.upload_folder(repo_id=name, repo_type="space", folder_path=folder, ignore_patterns=left)
    return f"{api.endpoint}/spaces/{name}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Push this folder as a Docker Space.")
    parser.add_argument("name", metavar="ORG/NAME")
    parser.add_argument("--public", action="store_true", help="agents in clouds must reach its gateway")
    parser.add_argument("--hardware", type=SpaceHardware, metavar="NAME", help="for this run: @HARDWARE@")
    parser.add_argument("--secrets", action="store_true", help="set: @SECRETS@")
    options = parser.parse_args()
    if options.name.count("/") != 1:
        sys.exit(f"push: a Space is named ORG/NAME, not {options.name}")
    try:
        print(push(options.name, public=options.public, hardware=options.hardware, secrets=options.secrets))
    except (HfHubHTTPError, OSError) as error:
        sys.exit(f"push: {str(error).strip().splitlines()[0]}")


if __name__ == "__main__":
    main()
