#!/usr/bin/env bash
# Installs what is missing on a fresh Debian 12 or 13, then prints the path of a Python environment on standard output:
#
#   venv=$(jobscripts/bootstrap.sh) && "$venv/bin/slurm-resil" --help
#
# Progress goes to standard error. Running it again takes about a second and always brings the environment up to the
# present source. It never starts, stops or configures a daemon of the system, and never touches /etc/slurm.
#
# Two environments lie in ${SLURM_RESIL_CACHE:-/var/cache/slurm-resil}, both readable by every user, because jobs do not
# run as root and root's home is closed to them:
#   deps-<hash>       what pyproject.toml asks for, shared by all checkouts with the same wishes
#   checkout-<hash>   a copy of this checkout's package on top of it
set -Eeuo pipefail
trap 'printf "bootstrap: error: line %s failed: %s\n" "$LINENO" "$BASH_COMMAND" >&2' ERR
umask 022

readonly PYTHON=/usr/bin/python3 # Debian's: an interpreter below /root cannot be run by a job's user
readonly CACHE=${SLURM_RESIL_CACHE:-/var/cache/slurm-resil}
readonly POLICY=/usr/sbin/policy-rc.d
readonly POLICY_MARK='# written by the bootstrap of slurm-resil while it installs packages'
readonly META=(pyproject.toml setup.cfg README.md LICENSE)
readonly UNITS=(mariadb munge slurmctld slurmd slurmdbd)
readonly PACKAGES=(
    slurm-wlm slurmdbd slurm-wlm-mysql-plugin slurm-wlm-basic-plugins libslurm-dev munge mariadb-server
    python3 python3-venv python3-dev gcc libc6-dev make
    iproute2 util-linux procps hostname ca-certificates shellcheck
)
# What pyproject.toml leaves open is closed here: the next major release of each is tried before it is used. A formatter
# and type checkers change their mind in minor releases too. The one PyTorch keeps anything else from bringing another.
readonly CONSTRAINTS='torch==2.13.0
click<9
ClusterShell<2
h5py<4
numpy<3
rich<16
safetensors<1
xxhash<5
mpi4py<5
mpich<6
mypy<3
pytest<10
pytest-timeout<3
ruff>=0.17,<0.18
setuptools<90
'

say() { printf 'bootstrap: %s\n' "$*" >&2; }
die() {
    printf 'bootstrap: error: %s\n' "$*" >&2
    exit 1
}

usage() {
    cat >&2 <<'HELP'
usage: bootstrap.sh [--no-system] [--help]
  --no-system   install no Debian packages, only make the Python environments
  environment: SLURM_RESIL_CACHE (default /var/cache/slurm-resil)
HELP
}

missing_packages() {
    local name
    for name in "${PACKAGES[@]}"; do
        [[ $(dpkg-query -W -f='${db:Status-Status}' "$name" 2>/dev/null) == installed ]] || printf '%s\n' "$name"
    done
}

restore_policy() {
    if [[ -f $POLICY ]] && grep -qsF "$POLICY_MARK" "$POLICY"; then
        rm -f "$POLICY"
        [[ ! -e $POLICY.slurm-resil ]] || mv "$POLICY.slurm-resil" "$POLICY"
    fi
}

# Debian starts a daemon when its package is installed, unless this policy forbids it.
forbid_service_starts() {
    restore_policy # of a run that was killed
    trap restore_policy EXIT
    [[ ! -e $POLICY ]] || mv "$POLICY" "$POLICY.slurm-resil"
    printf '#!/bin/sh\n%s\nexit 101\n' "$POLICY_MARK" >"$POLICY"
    chmod 755 "$POLICY"
}

install_packages() {
    local -a missing
    local unit log=$CACHE/apt.log
    mapfile -t missing < <(missing_packages)
    ((${#missing[@]})) || return 0
    say "installing ${#missing[@]} Debian packages: ${missing[*]}"
    forbid_service_starts
    export DEBIAN_FRONTEND=noninteractive
    apt-get update >"$log" 2>&1 ||
        { tail -n 5 "$log" >&2; die "apt-get update failed: is the network there? (all of it: $log)"; }
    apt-get install -y --no-install-recommends -o Dpkg::Options::=--force-confold "${missing[@]}" >>"$log" 2>&1 ||
        { tail -n 15 "$log" >&2; die "apt-get could not install ${missing[*]} (all of it: $log)"; }
    restore_policy
    trap - EXIT
    # what came with these packages just now must not start at the next boot either
    for unit in "${UNITS[@]}"; do
        if [[ " ${missing[*]} " == *" $unit"* || $unit == slurm[cd]* && " ${missing[*]} " == *" slurm-wlm "* ]]; then
            systemctl disable "$unit" >>"$log" 2>&1 || true # no such unit, or no systemd here: nothing to keep from starting
        fi
    done
}

# The requirements of the package with the extras that this checkout needs to run and to be tested, one a line.
requirements() {
    "$PYTHON" -I - "$checkout/pyproject.toml" <<'PYTHON'
import sys
import tomllib

with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)
names = list(project["build-system"]["requires"]) + list(project["project"]["dependencies"])
for extra in ("torch", "mpi", "export", "dev"):
    names += project["project"]["optional-dependencies"][extra]
print("\n".join(names))
PYTHON
}

short_hash() { sha256sum | cut -c1-12; }

pip_install() { # environment, then the arguments
    local venv=$1 log=$CACHE/pip.log
    shift
    "$venv/bin/python" -I -m pip --disable-pip-version-check --no-input install --quiet "$@" >"$log" 2>&1 ||
        { tail -n 15 "$log" >&2; die "pip could not install: is the package index reachable? (all of it: $log)"; }
}

make_deps() {
    local wishes
    wishes=$(requirements) || die "$checkout/pyproject.toml cannot be read"
    deps=$CACHE/deps-$({ "$PYTHON" -VV; printf '%s\n' "$wishes" "$CONSTRAINTS"; } | short_hash)
    [[ ! -e $deps/complete ]] || return 0
    say "making $deps (PyTorch is large: this takes a minute or more the first time)"
    rm -rf "$deps"
    "$PYTHON" -I -m venv "$deps" || die "$PYTHON cannot make an environment: is python3-venv installed?"
    printf '%s' "$CONSTRAINTS" >"$deps/constraints.txt"
    printf '%s\n' "$wishes" >"$deps/requirements.txt"
    # PyTorch first and alone, so that no other requirement decides where it comes from
    pip_install "$deps" 'torch==2.13.0' -c "$deps/constraints.txt"
    pip_install "$deps" -r "$deps/requirements.txt" -c "$deps/constraints.txt"
    touch "$deps/complete"
}

# Hash of everything that ends up in the checkout's environment.
source_hash() {
    {
        printf '%s\n' "$deps"
        cd "$checkout"
        find slurm_resil "${META[@]}" -type f ! -name '*.pyc' -print0 |
            LC_ALL=C sort -z | xargs -0 sha256sum
    } | short_hash
}

# MPI's libraries are searched for below the prefix of the interpreter that runs.
link_programs() {
    local file
    for file in "$deps"/lib/libmpi* "$deps"/lib/mpich; do
        ln -sfn "$file" "$venv/lib/${file##*/}"
    done
    # scripts in Python stay behind: they would run with the other environment's interpreter, use `python -m` for them
    for file in "$deps"/bin/{mpiexec*,mpirun,mpichversion,hydra*,ruff}; do
        ln -sfn "$file" "$venv/bin/${file##*/}"
    done
}

make_venv() {
    local stage now
    venv=$CACHE/checkout-$(printf '%s' "$checkout" | short_hash)
    now=$(source_hash)
    [[ $(cat "$venv/source" 2>/dev/null) != "$now" ]] || return 0
    say "bringing $venv up to the present source"
    if [[ $(readlink -f "$venv/deps") != "$deps" ]]; then
        rm -rf "$venv"
        "$PYTHON" -I -m venv --without-pip "$venv"
        ln -s "$deps" "$venv/deps"
        "$venv/bin/python" -I -c 'import sys, sysconfig
with open(sysconfig.get_path("purelib") + "/deps.pth", "w") as file:
    file.write(sysconfig.get_path("purelib", vars={"base": sys.argv[1]}) + "\n")' "$deps"
        link_programs
    fi
    # from a copy: a build inside the checkout leaves directories whose stale files would be installed next time
    stage=$(mktemp -d "$CACHE/build.XXXXXX")
    (cd "$checkout" && cp -a slurm_resil "${META[@]}" "$stage")
    pip_install "$venv" --no-deps --no-build-isolation --force-reinstall --no-index "$stage"
    rm -rf "$stage"
    printf '%s\n' "$now" >"$venv/source"
}

main() {
    local system=1
    while (($#)); do
        case $1 in
        --no-system) system=0 ;;
        -h | --help) usage && exit 0 ;;
        *) usage && exit 2 ;;
        esac
        shift
    done
    ((EUID == 0)) || die "run this as root: it installs packages, and the private cluster needs namespaces"
    { command -v apt-get && command -v dpkg-query; } >/dev/null ||
        die "there is no apt here: this script knows Debian 12 and 13 only; install by hand what README.md lists"
    checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
    mkdir -p "$CACHE" || die "cannot make $CACHE: set SLURM_RESIL_CACHE to another directory"
    setpriv --reuid=65534 --regid=65534 --clear-groups test -x "$CACHE" ||
        die "$CACHE is closed to other users, and jobs do not run as root: set SLURM_RESIL_CACHE to another directory"
    exec {lock}>"$CACHE/lock"
    if ! flock -n "$lock"; then
        say "another bootstrap is at work: waiting for it"
        flock -w 1800 "$lock" || die "another bootstrap still holds $CACHE/lock after 30 minutes"
    fi
    ((!system)) || install_packages
    [[ -x $PYTHON ]] || die "$PYTHON is missing"
    "$PYTHON" -I -c 'import sys; sys.exit(sys.version_info < (3, 11))' || die "$PYTHON is older than 3.11"
    make_deps
    make_venv
    printf '%s\n' "$venv"
}

main "$@"
