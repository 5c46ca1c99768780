#!/usr/bin/env bash
# Installs what is missing, then checks and tests everything:
#
#   tests/run.sh [--full] [--serial] [arguments for pytest]
#
# --serial runs one part after the other, which takes longer and leaves more time to each test.
# --full adds the long campaigns. Without it this takes about 40 minutes on two cores. Needs root on Debian 12 or 13,
# see jobscripts/bootstrap.sh; sandboxes that a failing or interrupted test left behind are taken down at the end.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

full=0 serial=0
while [[ ${1-} == --full || ${1-} == --serial ]]; do
    [[ $1 == --full ]] && full=1 || serial=1
    shift
done

venv=$(jobscripts/bootstrap.sh)
python=$venv/bin/python
work=$(mktemp -d /tmp/srt.XXXXXX) # short: paths of Unix sockets are limited
chmod 711 "$work" # jobs of the sandbox run as other users
export TMPDIR=$work
export PATH=$venv/bin:$PATH
export PYTHONDONTWRITEBYTECODE=1
export OMP_NUM_THREADS=1 # torch's threads wait actively for each other: many processes on few cores would crawl
failed=()

# shellcheck disable=SC2317 # called by the trap
take_down() {
    local marker
    trap '' INT TERM
    find "$work" -maxdepth 4 -name .slurm-resil-sandbox -print0 | while IFS= read -r -d '' marker; do
        "$python" -m slurm_resil sandbox down --dir "${marker%/*}" >/dev/null ||
            echo "run.sh: the sandbox in ${marker%/*} could not be taken down" >&2
    done
    rm -rf "$work"
}
trap take_down EXIT
children=() interrupted=0
trap 'interrupted=1; if ((${#children[@]})); then kill "${children[@]}" 2>/dev/null || true; else exit 143; fi' INT TERM

check() { # name, then the command; goes on after a failure, so that one run shows all of them
    local name=$1
    shift
    echo "== $name"
    "$@" || failed+=("$name")
}

mapfile -t scripts < <(find jobscripts tests spank site_configs .ci -type f \( -name '*.sh' -o -name '*.sbatch' -o -path '.ci/run' \))
check 'ruff format' "$venv/bin/ruff" format --check --quiet .
check 'ruff check' "$venv/bin/ruff" check --quiet .
check mypy "$python" -m mypy
check shellcheck shellcheck "${scripts[@]}"
check spank make -C spank check
((${#failed[@]} == 0)) || echo "== FAILED so far: ${failed[*]}"

# in the background, because bash acts on a signal only when its foreground process is over
finish() { # name, pid; sets status
    while :; do
        status=0
        wait "$2" || status=$?
        kill -0 "$2" 2>/dev/null || break
    done
    ((!interrupted)) || return 0
    # 5: the arguments chose none of these tests
    ((status == 0 || status == 5)) || failed+=("$1")
    ((status == 5)) || ran=1
}

ran=0 status=0 full_too=' and not full'
((!full)) || full_too=''

begin() { # an expression of markers, then arguments for pytest; sets pid
    local expression=$1
    shift
    "$python" -m pytest -o "cache_dir=$work/cache" -m "$expression$full_too" "$@" &
    pid=$!
}

# The stories wait more than they compute: all else runs beside them.
echo '== pytest, all else; shown below'
begin 'not story and not alone' "$@" >"$work/else.log" 2>&1
children=("$pid")
if ((serial)); then
    wait -f "$pid" || true # its status is asked for again below
    ((!interrupted)) || exit 130
fi
echo '== pytest, training stories'
begin 'story' "$@"
children+=("$pid")
finish stories "${children[1]}"
finish else "${children[0]}"
cat "$work/else.log"
children=()
((!interrupted)) || exit 130
echo '== pytest, alone on this host'
begin 'alone' "$@"
children=("$pid")
finish alone "${children[0]}"
children=()
((!interrupted)) || exit 130

((${#failed[@]} == 0)) || {
    printf '== FAILED: %s\n' "${failed[@]}"
    exit 1
}
((ran)) || exit 5
