#!/bin/sh
# written by `slurm-resil site`
exec /opt/slurm-resil/bin/python -I -S -c 'import sys; sys.path.append("/opt/slurm-resil/lib/python3.11/site-packages"); from slurm_resil.hooks import base, prolog; sys.exit(base.main(prolog.prolog, sys.argv[1:]))' --config /etc/slurm-resil/hooks.json
