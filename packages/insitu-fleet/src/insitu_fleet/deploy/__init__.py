"""`insitu deploy`: files that start a run as a container, Space, Slurm, Ray or Kubernetes job.

    configuration -> folder with insitu.toml, start.sh, Dockerfile, compose.yaml and the target's own file

Every target runs start.sh, which starts the engine beside insitu and ends all when any part ends. Secrets are
named in these files, never held.
"""

from typing import Literal

Target = Literal["space", "slurm", "ray", "k8s"]
