#!/usr/bin/env bash
# Starts the parts of a training run on one machine: the engine, if it is to run here, then insitu. All parts end
# as soon as one ends; the exit code is insitu's, or 1 when the engine ended first.
#   RUN_DIR         run directory; one that exists is resumed (default runs/main)
#   RESUME_FROM     hub:ORG/NAME: where there is no run directory, resume the checkpoint there, if there is one
#   TRAIN_RANKS     train.ranks in the place of the configuration's
#   ENGINE_START_S  longest start of the engine (default 600)
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
run=${RUN_DIR:-runs/main}
parts=()
ranks=(${TRAIN_RANKS:+"train.ranks=$TRAIN_RANKS"})

say() { printf 'start: %s\n' "$*" >&2; }

# Each part leads a process group of its own, so that its children end with it.
set -m
end() {
  trap - EXIT
  for pid in "${parts[@]}"; do kill -TERM -- "-$pid" 2>/dev/null; done
  for _ in {1..300}; do
    alive=0
    for pid in "${parts[@]}"; do kill -0 -- "-$pid" 2>/dev/null && alive=1; done
    ((alive)) || return
    sleep 0.1
  done
  for pid in "${parts[@]}"; do kill -KILL -- "-$pid" 2>/dev/null; done
}
trap end EXIT
trap 'exit 143' TERM
trap 'exit 130' INT

engine=(@ENGINE@)
engine_url='@ENGINE_URL@'
engine_pid=
if ((${#engine[@]})); then
  say "engine: ${engine[*]}"
  env @ENGINE_ENV@ "${engine[@]}" &
  engine_pid=$!
  parts+=("$engine_pid")
  for ((waited = 0; ; waited++)); do
    python3 -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=5)' \
      "$engine_url/health" 2>/dev/null && break
    kill -0 "$engine_pid" 2>/dev/null || { say "the engine ended before it was ready"; exit 1; }
    ((waited < ${ENGINE_START_S:-600})) || { say "the engine was not ready within ${ENGINE_START_S:-600} s"; exit 1; }
    sleep 1
  done
fi

if [[ -f $run/config.toml ]]; then
  insitu train --resume "$run" "${ranks[@]}" &
else
  insitu train insitu.toml --plain "run.dir=$run" "${ranks[@]}" ${RESUME_FROM:+--resume "$RESUME_FROM"} "$@" &
fi
trainer=$!
parts+=("$trainer")
wait -n "${parts[@]}"
if [[ -n $engine_pid ]] && ! kill -0 "$engine_pid" 2>/dev/null && kill -0 "$trainer" 2>/dev/null; then
  say "the engine ended; the run ends with it and can be resumed"
  exit 1
fi
wait "$trainer"
exit $?
