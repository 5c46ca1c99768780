#!/usr/bin/env bash
# Installs what is missing, starts a private Slurm cluster on this host, trains a small model under it and shows the job
# survive its walltime limit, a preemption, and the loss of a node together with that node's burst buffer:
#
#   jobscripts/quickstart.sh [--json] [--keep]
#
# Takes under five minutes once everything is installed, and takes everything down at the end (--keep: not the cluster).
# Needs root on Debian 12 or 13. Exit code 0: the job survived all three and ended with the bits of an undisturbed run.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
for argument; do
    case $argument in
    --json | --keep) ;;
    -h | --help) sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit 0 ;;
    *) echo "quickstart.sh: unknown option $argument (there are --json and --keep)" >&2 && exit 2 ;;
    esac
done

venv=$("$here/bootstrap.sh")
work=$(mktemp -d /tmp/resil-quick.XXXXXX)
chmod 711 "$work" # the cluster's users go through it

exec "$venv/bin/python" "$here/quickstart.py" --work "$work" "$@" # it takes everything down, on signals too
