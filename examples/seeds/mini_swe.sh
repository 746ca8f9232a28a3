#!/usr/bin/env bash
# The day of OpenEnv's mini_swe_env with asynchronous GRPO: faults to mend, training while agents work, a look, the model
# and the rollouts to the Hub. In a checkout, with `insitu` on PATH; arguments are keys of the configuration.
#   SWE_VLLM_URL, SWE_MODEL  a vLLM server and its model; without it the demo's model is trained on this CPU
#   SWE_TASKS                rows of a SWE set, in Docker sandboxes (docs/tasks.md); without it, generated faults
#   SWE_HUB_ID               ORG/NAME; without it pushes are dry runs. SWE_AGENT is the agent, by default pi
set -euo pipefail
run=${SWE_OUTPUT_DIR:-runs/mini_swe}
keys=("harness.agent=${SWE_AGENT:-pi}")
[[ -z "${SWE_TASKS:-}" ]] || keys+=(tasks.source=swe_gym "tasks.path=$SWE_TASKS" sandbox.backend=docker)
if [[ -n "${SWE_VLLM_URL:-}" ]]; then
  keys+=(engine.kind=vllm "engine.urls=[\"$SWE_VLLM_URL\"]" policy.kind=hf "model.path=${SWE_MODEL:-hub:Qwen/Qwen3-1.7B}")
fi
dry=()
[[ -n "${SWE_HUB_ID:-}" ]] || dry=(--dry-run)

[[ "${SWE_AGENT:-pi}" == script ]] || insitu install "${SWE_AGENT:-pi}"
insitu train examples/seeds/mini_swe.toml --plain "run.dir=$run" "${keys[@]}" "$@"
insitu show "$run"
checkpoints=("$run"/checkpoints/step-*)
insitu push "${checkpoints[-1]}" --to "hub:${SWE_HUB_ID:-me/mini-swe}" "${dry[@]}"
insitu push "$run" --to "hub:${SWE_HUB_ID:-me/mini-swe}-rollouts" "${dry[@]}"
