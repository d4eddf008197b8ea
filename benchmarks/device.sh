#!/usr/bin/env bash
# Proofs and the bench on a bare CUDA machine, in one folder: bash benchmarks/device.sh OUT
#
# Needs torch with CUDA and what the packages import, no nox and no network. Ends by itself before
# DEVICE_LIMIT_S (default 520 s); what was done by then is in OUT: ledger, records, generated tables, log.
set -uo pipefail

if [ $# -ne 1 ]; then
  echo "usage: bash benchmarks/device.sh OUT" >&2
  exit 2
fi
mkdir -p "$1"
out=$(cd "$1" && pwd)
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
device=${DEVICE:-cuda}
limit_s=${DEVICE_LIMIT_S:-520}
tables_s=20 # kept for the last step, whatever the others take
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

run() { # run SECONDS NAME COMMAND...: a step under its own limit and what is left of the whole; a failure ends nothing
  local most_s=$1 name=$2 left_s=$((limit_s - tables_s - SECONDS))
  shift 2
  if [ "$left_s" -lt 5 ]; then
    echo "== $name: no time left" | tee -a "$out/log.txt"
    return
  fi
  [ "$most_s" -lt "$left_s" ] || most_s=$left_s
  echo "== $name ($SECONDS s since the start, limit $most_s s)" | tee -a "$out/log.txt"
  timeout -k 5 "$most_s" "$@" >>"$out/log.txt" 2>&1
  echo "== $name ended with $?" | tee -a "$out/log.txt"
}

common=(--device "$device" --ledger "$out/ledger" --out "$out/records")
run 260 proofs "$python" -m proofs --all --device "$device" --ledger "$out/ledger"
for operator in attention moe cross_entropy sampler optimizer_step block; do
  run 60 "$operator" "$python" -m benchmarks --suite "$operator" --rounds 2 --budget 0.2 "${common[@]}"
done
for dtype in float32 bfloat16_autocast; do
  run 90 "engine_1b $dtype" "$python" -m benchmarks --suite engine_1b --full --axes B=4 --dtype "$dtype" \
    "${common[@]}"
done
for suite in engine trainer scaling breakdown cumulative; do
  run 40 "$suite" "$python" -m benchmarks --suite "$suite" --rounds 1 --budget 0.2 "${common[@]}"
done
limit_s=$((SECONDS + 2 * tables_s))
run 20 tables "$python" -m reports build --records "$out/records" --ledger "$out/ledger" --out "$out/generated" --readme "$out/none"
echo "done after $SECONDS s: $out" | tee -a "$out/log.txt"
