"""Names for what nobody has named."""

from __future__ import annotations


def process_name(pid: int) -> str:
    """Name of a process that no other one of this host has or had; its number alone comes again."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            started = int(file.read().rpartition(")")[2].split()[19])  # in ticks since the host was started
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read(8)
    except (OSError, IndexError, ValueError):
        return f"local-{pid}"
    return f"local-{pid}-{started:x}-{boot}"
