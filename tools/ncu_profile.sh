#!/usr/bin/env bash
# Profile the kernels of rounds with Nsight Compute: the time of each, and its bytes from memory and to it.
#
#   tools/ncu_profile.sh [--print] [--eager] [--kernels REGEX] [--skip N] [--count N] [--set NAME] [--output NAME]
#                        [--gpu NAME] -- ARGUMENTS
#
# ARGUMENTS are those of tools/profile_round.py: MODEL --draft DRAFT --num-draft-tokens M ... One round is run.
#
#   --print           print the commands and run nothing
#   --eager           rounds without graphs
#   --kernels REGEX   kernels by their function's name (all); e.g. 'rms_norm|silu'
#   --skip N          of these leave out the first N launches (0)
#   --count N         and take N of the others (all)
#   --set NAME        also what a set of ncu has, e.g. full; every kernel then runs several times, from an empty cache
#   --output NAME     of the report and the table without their suffixes (kernels)
#   --gpu NAME        whose peak bandwidth to compare with, e.g. H200
#
# PYTHON is the interpreter (python3). Status 3: ncu is not installed. Every command that runs is printed first.
set -euo pipefail

tools=$(dirname -- "${BASH_SOURCE[0]}")
python=${PYTHON:-python3}
print=false mode=--graph kernels=. skip=0 count=() set=() cache=none output=kernels gpu=()

fail() {
    printf 'ncu_profile: error: %s\n' "$1" >&2
    exit 2
}

number() {
    [[ $2 =~ ^[0-9]+$ ]] || fail "$1 needs a number, got $2"
}

while (($#)); do
    case $1 in
        --print) print=true ;;
        --eager) mode=--eager ;;
        --kernels | --skip | --count | --set | --output | --gpu)
            (($# > 1)) || fail "$1 needs a value"
            case $1 in
                --kernels) kernels=$2 ;;
                --skip)
                    number "$1" "$2"
                    skip=$2
                    ;;
                --count)
                    number "$1" "$2"
                    count=(--launch-count "$2")
                    ;;
                --set) set=(--set "$2") ;;
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
(($#)) || fail "what to profile is missing: -- MODEL [arguments of profile_round.py]"
if ((${#set[@]})); then
    cache=all
fi

# So few metrics that one pass over a kernel should do (ncu says how many it takes): the kernel finds the L2 cache as
# the one before left it. In further passes it would find what the first one loaded, so there ncu has to empty the
# cache. Clocks stay as they are in use.
profile=(
    ncu
    --export "$output"
    --force-overwrite
    --target-processes all
    --profile-from-start off
    --graph-profiling node
    --clock-control none
    --cache-control "$cache"
    --kernel-name "regex:$kernels"
    --launch-skip "$skip" "${count[@]}"
    "${set[@]}"
    --metrics "gpu__time_duration.sum,dram__bytes_read.sum,dram__bytes_write.sum"
    "$python" "$tools/profile_round.py" --profiler nsight "$mode" "$@" --rounds 1
)
# Numbers as in 1,234.5, whatever the language of the user.
table=(env LC_ALL=C ncu --import "$output.ncu-rep" --csv --page raw --print-units base)
report=("$python" "$tools/nsight_report.py" "$output.csv" "${gpu[@]}" -- "$@" --rounds 1)

show() {
    local word
    for word; do
        if [[ $word =~ ^[A-Za-z0-9_./:=,+-]+$ ]]; then printf '%s ' "$word"; else printf '%q ' "$word"; fi
    done
    printf '%s\n' "${after:-}"
}

commands() {
    show "${profile[@]}"
    after="> $(printf '%q' "$output.csv")" show "${table[@]}"
    show "${report[@]}"
}

if $print; then
    commands
    exit 0
fi
if ! command -v ncu >/dev/null; then
    {
        echo "ncu_profile: ncu is not installed. It comes with the CUDA toolkit, and as package nsight-compute from"
        echo "NVIDIA's repositories: https://developer.nvidia.com/nsight-compute. Without it,"
        echo "$python $tools/profile_round.py shows times under torch's profiler. What would run:"
        commands
    } >&2
    exit 3
fi
commands >&2
"${profile[@]}"
"${table[@]}" >"$output.csv"
"${report[@]}"
