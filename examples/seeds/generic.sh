#!/usr/bin/env bash
# The day of torchforge's generic loop: three functions for one language, training, a look, the model to the Hub. In a
# checkout, with `insitu` on PATH; arguments are keys of the configuration.
#   GENERIC_LANGUAGE  python, or julia, which needs `julia` on PATH
#   GENERIC_VLLM_URL, GENERIC_MODEL  a vLLM server and its model; without it the demo's model is trained on this CPU
#   GENERIC_HUB_ID    ORG/NAME; without it the push is a dry run
set -euo pipefail
language=${GENERIC_LANGUAGE:-python}
run=${GENERIC_OUTPUT_DIR:-runs/generic}
[[ "$language" != julia ]] || command -v julia >/dev/null || { echo "generic: julia is not on PATH" >&2; exit 1; }
model=()
if [[ -n "${GENERIC_VLLM_URL:-}" ]]; then
  model=(engine.kind=vllm "engine.urls=[\"$GENERIC_VLLM_URL\"]" policy.kind=hf "model.path=${GENERIC_MODEL:?its folder}")
fi
to=(--to "hub:${GENERIC_HUB_ID:-me/generic}")
[[ -n "${GENERIC_HUB_ID:-}" ]] || to+=(--dry-run)

insitu tasks list "examples/generic/$language.toml"
insitu train "examples/generic/$language.toml" --plain "run.dir=$run" "${model[@]}" "$@"
insitu show "$run"
checkpoints=("$run"/checkpoints/step-*)
insitu push "${checkpoints[-1]}" "${to[@]}"
