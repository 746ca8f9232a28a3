#!/usr/bin/env bash
# The day of OpenEnv's terminus_env with TRL: shell tasks of rows, GRPO, a look, the model to the Hub. In a checkout,
# with `insitu` on PATH; arguments are keys of the configuration. Variables are upstream's:
#   TERMINUS_VLLM_SERVER_URL  a vLLM server; TERMINUS_MODEL is its model's folder or hub:ORG/NAME. Without it the demo's
#                             model is trained on this CPU, which solves none of these tasks
#   TERMINUS_OUTPUT_DIR, TERMINUS_HUB_MODEL_ID  without the latter the push is a dry run
set -euo pipefail
run=${TERMINUS_OUTPUT_DIR:-runs/terminus}
model=(train.degenerate=keep train.kl=k3 train.kl_weight=0.01)
if [[ -n "${TERMINUS_VLLM_SERVER_URL:-}" ]]; then
  model=(engine.kind=vllm "engine.urls=[\"$TERMINUS_VLLM_SERVER_URL\"]" policy.kind=hf
    "model.path=${TERMINUS_MODEL:-hub:Qwen/Qwen3-0.6B}" harness.agent=terminus)
fi
to=(--to "hub:${TERMINUS_HUB_MODEL_ID:-me/terminus}")
[[ -n "${TERMINUS_HUB_MODEL_ID:-}" ]] || to+=(--dry-run)

insitu tasks validate examples/seeds/terminus.toml --repeats 1 --out "$run.tasks" # each solution passes, each base fails
insitu train examples/seeds/terminus.toml --plain "run.dir=$run" "${model[@]}" "$@"
insitu show "$run"
checkpoints=("$run"/checkpoints/step-*)
insitu push "${checkpoints[-1]}" "${to[@]}"
