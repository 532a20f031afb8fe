#!/usr/bin/env bash
# One stage of a checkpoint on the Hub, fetched without the others. Run it on each node:
#   bash examples/split_from_hub.sh REPO PP_SIZE STAGE OUT
# REPO is org/name or, better, org/name@COMMIT: all nodes need the same. Needs reshard on PATH.
set -euo pipefail
repo=$1 pp_size=$2 stage=$3 out=$4

show() {
    printf '\n$ %s\n' "$*"
    "$@"
}

# Reads headers only.
show reshard plan "$repo" --pp-size "$pp_size"

# If this is killed, the same command continues.
show reshard split "$repo" "$out" --pp-size "$pp_size" --stage "$stage"

# Not needed: fetches the stage a second time, and compares every byte.
show reshard verify "$out" --source "$repo"

printf '\nfor the engine: %s/stage-%02d-of-%02d\n' "$out" "$stage" "$pp_size"
