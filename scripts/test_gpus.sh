#!/usr/bin/env bash
# Runs tests/test_cuda.py in parallel parts on all GPUs of the machine: about four minutes on two GPUs.
#   scripts/test_gpus.sh        uses .venv, or the environment of a bundle's env.sh; PYTHON names another interpreter
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
[ -n "${PYTHON:-}" ] || [ ! -x .venv/bin/python ] || python=.venv/bin/python
mapfile -t gpus < <(nvidia-smi --query-gpu=index --format=csv,noheader)
[ ${#gpus[@]} -gt 0 ] || { echo "test_gpus.sh: no GPU here" >&2; exit 1; }
logs=$(mktemp -d)
count=0 failed=0
# Bound to cores, the workers of all parts would share the first cores.
export OMP_NUM_THREADS=4 STARPU_WORKERS_NOBIND=1
part() { # NAME EXPRESSION
    CUDA_VISIBLE_DEVICES=${gpus[$((count++ % ${#gpus[@]}))]} "$python" -P -m pytest -q tests/test_cuda.py -k "$2" >"$logs/$1" 2>&1 &
    names[$!]=$1
}
all() {
    for process in "${!names[@]}"; do
        wait "$process" || { failed=1; cat "$logs/${names[$process]}"; }
        echo "${names[$process]}: $(tail -n 1 "$logs/${names[$process]}")"
    done
    names=()
}
declare -a names=()
operator="test_operator and not large" large="test_operator_on_large_tiles" rest="not test_operator and not several"
part bf16 "$operator and bf16"
part fp16 "$operator and fp16"
part fp32 "$operator and fp32"
part large-bf16 "$large and bf16"
part large-fp16 "$large and fp16"
part large-fp32 "$large and fp32"
part training "$rest and training"
part eviction "$rest and eviction and not disk"
part disk "$rest and disk"
part others "$rest and not training and not eviction and not disk"
all
if [ ${#gpus[@]} -gt 1 ]; then
    "$python" -P -m pytest -q tests/test_cuda.py -k "test_several_gpus" || failed=1
fi
rm -rf "$logs"
exit "$failed"
