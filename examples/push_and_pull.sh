#!/usr/bin/env bash
# Split once, publish, and give each node its stage:
#   bash examples/push_and_pull.sh SOURCE REPO PP_SIZE DIR
# SOURCE is a directory or org/name, REPO the org/name to publish in. Needs reshard on PATH, and a
# token that may write to REPO: hf auth login, or HF_TOKEN.
set -euo pipefail
source=$1 repo=$2 pp_size=$3 dir=$4

show() {
    printf '\n$ %s\n' "$*"
    "$@"
}

# On one machine. Each of the two commands continues if it was killed.
show reshard split "$source" "$dir/bundles" --pp-size "$pp_size"
commit=$(reshard push "$dir/bundles" "$repo" --json |
    python -c 'import json, sys; print(json.load(sys.stdin)["commit"])')

# On each node one of these, with the same path on all; here all of them, with different paths.
for ((stage = 0; stage < pp_size; stage++)); do
    show reshard pull "$repo@$commit" "$dir/node$stage" --stage "$stage"
    show reshard verify "$dir/node$stage"
done
