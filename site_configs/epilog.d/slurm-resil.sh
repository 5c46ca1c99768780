#!/bin/sh
# written by `slurm-resil site`
exec /opt/slurm-resil/bin/python -I -S -c 'import sys; sys.path.append("/opt/slurm-resil/lib/python3.11/site-packages"); from slurm_resil.hooks import base, epilog; sys.exit(base.main(epilog.epilog, sys.argv[1:]))' --config /etc/slurm-resil/hooks.json
