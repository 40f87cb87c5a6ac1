#!/usr/bin/env bash
# Measure a machine with GPUs. Each row of the tables is a JSON file in a folder.
#   experiments/gpus.sh [step] [scaling] [strong] [peers] [metg] [capacity] [policies] [figures]     OUT=runs/gpus
# Each part takes some minutes. `nntile` must be on the PATH.
set -uo pipefail
out=${OUT:-runs/gpus}
mkdir -p "$out"
gpus=$(nvidia-smi -L 2>/dev/null | wc -l)
[ "$gpus" -gt 0 ] || { echo "gpus.sh: no GPU here" >&2; exit 1; }
counts=$(for n in 1 2 4 8; do [ "$n" -gt "$gpus" ] || echo "$n"; done)
S124M="" S355M="--set model.layers=24 --set model.embed=1024 --set model.heads=16" S774M="--set model.layers=36 --set model.embed=1280 --set model.heads=20"
SXL="--set model.layers=48 --set model.embed=1600 --set model.heads=25" S2B7="--set model.layers=32 --set model.embed=2560 --set model.heads=32"
config=$(dirname "$0")/gpt2_124m.yaml

bench() { # NAME SIZES BATCH TILES(of the batch; "": uncut) GPUS ARGUMENTS...
    echo "$1"
    # shellcheck disable=SC2086
    nntile bench step "$config" --set tokenizer.vocab_size=50304 --json --time-limit 300 $2 --set train.batch="$3" \
        ${4:+--set tiles.batch=$4} --set runtime.cuda="$5" ${*:6} >"$out/$1.json" 2>"$out/$1.log" || tail -n 3 "$out/$1.log"
}
step() {
    bench step-124m "$S124M" 32 "" 1 --peer torch --rounds 5 --steps 6 --losses 50
    bench step-355m "$S355M" 16 "" 1 --peer torch_compile --rounds 5 --steps 5
    bench step-774m "$S774M" 16 "" 1 --peer torch_compile --rounds 5 --steps 3
    bench step-xl "$SXL" 16 "" 1 --peer torch_compile --rounds 4 --steps 3
    bench step-2.7b "$S2B7" 8 "" 1 --peer torch_compile --rounds 4 --steps 2
}
scaling() { # the same batch for each GPU
    for n in $counts; do
        bench "weak-xl-$n" "$SXL" $((16 * n)) 16 "$n" --rounds 3 --steps 3
        bench "weak-2.7b-$n" "$S2B7" $((8 * n)) 8 "$n" --rounds 3 --steps 3
    done
}
strong() { # the same batch for all GPUs together
    for n in $counts; do
        bench "strong-xl-$n" "$SXL" 16 $((16 / n)) "$n" --rounds 3 --steps 3
        bench "strong-2.7b-$n" "$S2B7" 8 $((8 / n)) "$n" --rounds 3 --steps 3
    done
}
peers() { # 12 sequences a GPU, as two contestants share its memory
    for peer in ddp fsdp2; do
        bench "xl-$peer-$gpus" "$SXL" $((12 * gpus)) 12 "$gpus" --peer $peer --rounds 3 --steps 3
    done
}
metg() {
    nntile bench metg --cuda 1 --json >"$out/metg-1.json"
    # One thread submits to all GPUs: the shortest tasks would take minutes.
    [ "$gpus" = 1 ] || nntile bench metg --cuda "$gpus" --us 5,10,20,50,100,200,500,1000 --seconds 0.1 --repeats 3 --json >"$out/metg-$gpus.json"
}
capacity() { nntile bench capacity --cuda "$gpus" --cuda-memory 20 --search --rounds 1 --budget 60 --time-limit 60 --out "$out/capacity"; }
policies() { limited 120 nntile sweep experiments/policies.yaml --set runtime.cuda="$gpus" --set train.batch=$((16 * gpus)) --out "$out/policies"; }
limited() { # SECONDS COMMAND...; the same command later continues a sweep or experiment that was cut off
    timeout -s INT -k 10 "$@" || echo "gpus.sh: status $?: ${*:2}" >&2
}
figure() { # NAME MODE SECONDS
    echo "$1 $2"
    limited "$3" nntile experiment "$1" --scale gpu --mode "$2" --out "$out/$1-$2"
}
figures() { # the most important first
    figure fig17 training 180  # includes StarPU's measurement of buses and Triton's compilations on a new machine
    figure fig17 inference 60
    figure fig18 inference 90
    figure fig18 training 120
    for name in fig15 fig16; do for mode in inference training; do figure $name $mode 60; done; done
    for name in fig09 fig14; do for mode in inference training; do figure $name $mode 60; done; done
}

[ $# -gt 0 ] || set -- step scaling strong peers metg capacity policies figures
for part in "$@"; do
    case $part in
    step | scaling | strong | peers | metg | capacity | policies | figures) $part ;;
    *) echo "gpus.sh: no part $part; there are step, scaling, strong, peers, metg, capacity, policies, figures" >&2; exit 2 ;;
    esac
done
