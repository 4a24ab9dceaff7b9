#!/usr/bin/env bash
# Profile rounds with Nsight Systems, and print the time of each kernel and its bytes per second.
#
#   tools/nsys_profile.sh [--print] [--eager] [--graph-trace node|graph] [--output NAME] [--gpu NAME] -- ARGUMENTS
#
# ARGUMENTS are those of tools/profile_round.py: MODEL --draft DRAFT --num-draft-tokens M ...
#
#   --print              print the commands and run nothing
#   --eager              rounds without graphs, with NVTX ranges around their parts
#   --graph-trace KIND   node (the default): every kernel of a graph; graph: whole graphs, which slows them down less
#   --output NAME        of the report without its suffix (round)
#   --gpu NAME           whose peak bandwidth to compare with, e.g. H200
#
# PYTHON is the interpreter (python3). Status 3: nsys is not installed. Every command that runs is printed first.
set -euo pipefail

tools=$(dirname -- "${BASH_SOURCE[0]}")
python=${PYTHON:-python3}
print=false mode=--graph graph_trace=node output=round gpu=()

fail() {
    printf 'nsys_profile: error: %s\n' "$1" >&2
    exit 2
}

while (($#)); do
    case $1 in
        --print) print=true ;;
        --eager) mode=--eager ;;
        --graph-trace | --output | --gpu)
            (($# > 1)) || fail "$1 needs a value"
            case $1 in
                --graph-trace) graph_trace=$2 ;;
                --output) output=$2 ;;
                --gpu) gpu=(--gpu "$2") ;;
            esac
            shift
            ;;
        -h | --help)
            sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
            exit 0
            ;;
        --)
            shift
            break
            ;;
        *) fail "unknown option $1; arguments of profile_round.py go behind --" ;;
    esac
    shift
done
[[ $graph_trace == node || $graph_trace == graph ]] || fail "--graph-trace must be node or graph, got $graph_trace"
(($#)) || fail "what to profile is missing: -- MODEL [arguments of profile_round.py]"

# Only kernels matter here: no sampling of the CPU and no context switches, which cost time. The capture range leaves
# out loading, the prompt and the recording of graphs; "stop" lets the program go on to its end. Without nodes, nsys
# shows a graph as one block.
profile=(
    nsys profile
    --output="$output"
    --force-overwrite=true
    "--trace=cuda,nvtx,cublas"
    --sample=none
    --cpuctxsw=none
    --cuda-graph-trace="$graph_trace"
    --capture-range=cudaProfilerApi
    --capture-range-end=stop
    "$python" "$tools/profile_round.py" --profiler nsight "$mode" "$@"
)
convert=(nsys export --type=sqlite --force-overwrite=true --output="$output.sqlite" "$output.nsys-rep")
stats=(nsys stats --report=nvtx_gpu_proj_sum --format=table "$output.nsys-rep")
report=("$python" "$tools/nsight_report.py" "$output.sqlite" "${gpu[@]}" -- "$@")

show() {
    local word
    for word; do
        if [[ $word =~ ^[A-Za-z0-9_./:=,+-]+$ ]]; then printf '%s ' "$word"; else printf '%q ' "$word"; fi
    done
    printf '\n'
}

commands() {
    show "${profile[@]}"
    show "${convert[@]}"
    if [[ $mode == --eager ]]; then show "${stats[@]}"; fi
    show "${report[@]}"
}

if $print; then
    commands
    exit 0
fi
if ! command -v nsys >/dev/null; then
    {
        echo "nsys_profile: nsys is not installed. It comes with the CUDA toolkit, and as package nsight-systems-cli"
        echo "from NVIDIA's repositories: https://developer.nvidia.com/nsight-systems. Without it,"
        echo "$python $tools/profile_round.py shows times under torch's profiler. What would run:"
        commands
    } >&2
    exit 3
fi
commands >&2
"${profile[@]}"
"${convert[@]}"
if [[ $mode == --eager ]]; then "${stats[@]}"; fi
"${report[@]}"
