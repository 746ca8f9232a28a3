#!/usr/bin/env bash
# Run it on a machine of the Ray cluster, which gets the learner: bash job.sh. All machines need insitu; PYTHON_ENV names
# a virtual environment to activate here, MODEL_DIR the start model on the other machines, if it has another path there,
# HOSTS another number of machines.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
[[ -z ${PYTHON_ENV:-} ]] || source "$PYTHON_ENV/bin/activate"
each=@RANKS_EACH@ here=@RANKS_HERE@ port=${RANKS_PORT:-@RANKS_PORT@}
((each)) || exec bash start.sh
exec python3 -u -P -m insitu_fleet.ray_ranks --hosts "${HOSTS:-@NODES@}" --here "$here" --each "$each" --port "$port" \
  --gpus @GPUS@ --model "${MODEL_DIR:-}" -- bash start.sh
