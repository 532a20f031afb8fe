#!/usr/bin/env bash
# Download with a network, split without one:
#   bash examples/offline.sh REPO PP_SIZE DIR
# REPO is org/name or org/name@COMMIT. Needs reshard and hf on PATH.
set -euo pipefail
repo=$1 pp_size=$2 dir=$3

show() {
    printf '\n$ %s\n' "$*"
    "$@"
}

# Where there is a network. The cache in DIR is what to carry to the other machine.
export HF_HUB_CACHE=$dir/cache
case $repo in *@*) revision=${repo#*@} ;; *) revision=main ;; esac
show hf download "${repo%@*}" --revision "$revision"

# Where there is none: the same name now means what the cache holds.
export HF_HUB_OFFLINE=1
show reshard split "$repo" "$dir/bundles" --pp-size "$pp_size"
show reshard verify "$dir/bundles" --source "$repo"
