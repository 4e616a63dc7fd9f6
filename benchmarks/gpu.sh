#!/bin/sh
# Latency, offline and ops records of one GPU, as behind the README's figures; run it in the repository's root:
# benchmarks/gpu.sh [FOLDER [latency|offline|ops]]. Records go to FOLDER, or where `cairn bench` puts them.
set -e
export CAIRN_COMMIT="${CAIRN_COMMIT:-$(git rev-parse --short HEAD)}"
folder=$1
what=${2:-all}

bench() { # COMMAND NAME OPTION...: a file of records, what is measured
    command=$1 name=$2
    shift 2
    python3 -m cairn bench "$command" --device cuda ${folder:+--output "$folder/$name.json"} "$@"
}

latency() {
    bench latency "$@"
}

wanted() {
    [ "$what" = all ] || [ "$what" = "$1" ]
}

if wanted latency; then
    small="--shape 345m --steps 64"
    latency latency $small --contexts 8192,16384,32768,65536,131072 --batches 1
    latency latency $small --contexts 8192,16384,32768,65536,131072,524288 --batches 8 --fill
    latency latency $small --contexts 8192,32768 --batches 64 --fill
    latency latency $small --kind hsa --contexts 131072 --batches 64 --fill --kv-cache-memory 71GiB
    latency latency $small --kind hsa --contexts 524288 --batches 1
    latency latency $small --kind dense --contexts 524288 --batches 1 --fill
    latency latency-7b --shape 7b --contexts 8192,131072 --batches 1 --kind hsa
    latency latency-7b --shape 7b --contexts 8192 --batches 1 --kind dense
    overlap="--shape 345m --batches 1 --kind hsa"
    latency latency-overlap $overlap --contexts 32768,131072 --overlap
    latency latency-overlap $overlap --contexts 32768 --chunked-prefill-size 2048
fi
if wanted offline; then
    many="--shape 345m --max-num-seqs 256"
    bench offline offline-345m $many --num-prompts 1024 --input-len 200 --output-len 200
    bench offline offline-345m $many --num-prompts 3000 --input-len 60 --output-len 8
    bench offline offline-345m $many --num-prompts 512 --input-len 1024 --output-len 128
    bench offline offline-345m --shape 345m --num-prompts 64 --input-len 16000 --output-len 128
fi
if wanted ops; then
    python3 -m cairn bench ops ${folder:+--output "$folder/ops.json"}
fi
