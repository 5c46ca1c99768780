"""How a hook is started: the one command line for site scripts, the command line and the benchmark.

Not ``python -m``: ``runpy`` and ``site`` together cost as much as the hook itself. ``-I -S`` reads no environment, no
user's directory and no ``.pth`` file; the package's own directory is all that a hook needs.
"""

from __future__ import annotations

import os
import sys

NAMES = ("prolog", "epilog")
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def command(name: str, config: str, *, python: str = "", packages: str = "") -> list[str]:
    """Command line of a hook.

    Args:
        name: ``prolog`` or ``epilog``.
        config: Its hooks.json.
        python: Interpreter; default: this one.
        packages: Directory that holds the package; default: where this one is.
    """
    place = packages or _ROOT
    plain = place.isprintable() and not set(place) & set('"\\')
    text = f'"{place}"' if plain else repr(place)  # single quotes inside of a script's own are hard to read
    code = f"import sys; sys.path.append({text}); from slurm_resil.hooks import base, {name}; "
    code += f"sys.exit(base.main({name}.{name}, sys.argv[1:]))"
    return [python or sys.executable, "-I", "-S", "-c", code, "--config", config]
