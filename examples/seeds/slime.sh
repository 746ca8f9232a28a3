#!/usr/bin/env bash
# The day of slime's coding agent: Claude Code with sub-agents and compaction, its segments, a look, the rollouts to the
# Hub. In a checkout, with `insitu` on PATH; arguments are keys of the configuration.
#   SLIME_SCRIPT  slime's own launch script: it trains, by insitu's functions. It needs SGLang, Megatron and GPUs, and
#                 INSITU_CONFIG for it is the file below. Without it insitu makes the rollouts that slime would be given,
#                 of the demo's model on this CPU
#   PROMPT_DATA   slime's rows, in Docker sandboxes; without it, generated faults
#   SLIME_SCENARIO, SLIME_AGENT  linear, subagents, compact or mixed (the default); claude_code by default
#   SLIME_HUB_ID  ORG/NAME; without it the push is a dry run
set -euo pipefail
run=${SLIME_OUTPUT_DIR:-runs/slime}
config=examples/claude_code/${SLIME_SCENARIO:-mixed}.toml
if [[ -n "${SLIME_SCRIPT:-}" ]]; then
  INSITU_CONFIG=$config exec bash "$SLIME_SCRIPT" \
    --custom-generate-function-path insitu_bridges.slime.generate \
    --custom-reward-post-process-path insitu_bridges.slime.rewards \
    --prompt-data "${PROMPT_DATA:?slime needs its rows}" --input-key prompt --label-key label --metadata-key metadata
fi
keys=("harness.agent=${SLIME_AGENT:-claude_code}")
[[ -z "${PROMPT_DATA:-}" ]] || keys+=(tasks.source=slime "tasks.path=$PROMPT_DATA" sandbox.backend=docker)
dry=()
[[ -n "${SLIME_HUB_ID:-}" ]] || dry=(--dry-run)

[[ "${SLIME_AGENT:-claude_code}" == script ]] || insitu install "${SLIME_AGENT:-claude_code}"
insitu rollout "$config" --plain "run.dir=$run" "${keys[@]}" "$@"
insitu show "$run"
insitu query "$run" "SELECT rollout_id, COUNT(*) AS segments FROM segments GROUP BY 1 LIMIT 10"
insitu push "$run" --to "hub:${SLIME_HUB_ID:-me/slime-rollouts}" "${dry[@]}"
