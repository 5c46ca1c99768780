"""What of a checkpoint is restored, how strictly, and what became of the rest. No torch here: scripts name these first.

A pattern is a glob over paths as errors print them, parts joined by ``/``: ``model/head.weight``,
``optimizer/state/model/head.weight``, ``optimizer/groups/0/lr``. It takes what it matches and everything below;
``*`` matches ``/`` too. Nothing that options do is silent: a pattern that matches nothing is an error, and all that was
left as it is stands in the report and in the log.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from slurm_resil.core.errors import UsageError

SHOWN = 5  # paths of a kind that a summary lists


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How a restore may differ from everything, exactly; the defaults let nothing differ.

    Whatever they say, all is compared and verified before the first byte is changed.

    Attributes:
        include: Globs of what is restored, one or several; none: everything. The rest stays as it is.
        exclude: Globs of what stays as it is, also of what ``include`` takes.
        allow_missing: What is in the state, not in the checkpoint, stays as it is, instead of being an error: a new
            layer, its place in the optimizer. What a plain value holds comes and goes in any case.
        allow_unexpected: What is in the checkpoint, not in the state, is left out, instead of being an error.
        cast: Floating-point and complex numbers of another precision are converted, as ``Tensor.to`` does, instead of
            being an error; integers never. What does not fit the narrower type becomes infinite there, as in torch.
        device: Where tensors of the meta device are made, as ``torch.device`` takes it. Default: that of the mesh for
            distributed tensors; for others the kind of device they were saved from, where there is one, else the host.

    Raises:
        UsageError: A pattern is empty or no text.
    """

    include: str | Sequence[str] = ()
    exclude: str | Sequence[str] = ()
    allow_missing: bool = False
    allow_unexpected: bool = False
    cast: bool = False
    device: str | None = None

    def __post_init__(self) -> None:
        for name in ("include", "exclude"):
            value = getattr(self, name)
            patterns = (value,) if isinstance(value, str) else tuple(value)
            for pattern in patterns:
                if not isinstance(pattern, str) or not pattern:
                    raise UsageError(
                        f"{name}={pattern!r} is no pattern", mend="give globs over paths of the state, 'model/*.bias'"
                    )
            object.__setattr__(self, name, patterns)


@dataclass(kw_only=True)
class LoadReport:
    """What a restore did not do as it stands in the checkpoint; all empty for an ordinary one.

    Attributes:
        skipped: Paths that the options left out, each the topmost one.
        missing: In the state, not in the checkpoint: left as it was.
        unexpected: In the checkpoint, not in the state: not read.
        cast: Paths that were converted, with both types.
        kept: Rank-private state that was left as it was, see ``ckpt.private``.
    """

    skipped: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    cast: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any(vars(self).values())

    def __str__(self) -> str:
        texts = {
            "left out as asked": self.skipped,
            "not in the checkpoint and left as it was": self.missing,
            "in the checkpoint and not in the state": self.unexpected,
            "converted": self.cast,
            "each rank's own and left as it was": self.kept,
        }
        return "; ".join(f"{what}: {listed(paths)}" for what, paths in texts.items() if paths)


def listed(texts: Sequence[str], by: str = ", ") -> str:
    """The first few of some texts, and how many more there are."""
    more = f"{by}and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return f"{by.join(texts[:SHOWN])}{more}"
