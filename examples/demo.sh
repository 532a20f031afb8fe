#!/usr/bin/env bash
# The whole journey on a small checkpoint: bash examples/demo.sh DIR (make demo calls it).
# Needs reshard on PATH.
set -euo pipefail
examples=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
cd "$1"

show() {
    printf '\n$ %s\n' "$*"
    "$@"
}

python "$examples/tiny_checkpoint.py" tiny-qwen3.5-moe
show reshard inspect tiny-qwen3.5-moe
show reshard plan tiny-qwen3.5-moe --pp-size 4
show reshard split tiny-qwen3.5-moe bundles --pp-size 4
show reshard verify bundles --source tiny-qwen3.5-moe
show reshard split bundles bundles-pp2 --pp-size 2 --balance
show reshard pull bundles stage-2 --stage 2
show ls stage-2
show reshard merge bundles merged
show reshard inspect merged
