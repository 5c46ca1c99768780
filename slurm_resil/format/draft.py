"""What a rank tells its agent about a slot that it has written: what may differ from the save before, and no more.

The rest, items and those parts of the values that stay the same, is in a description of the slot, written when the
slot is laid out. From both the agent makes the manifest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from slurm_resil.core import fsio, paths
from slurm_resil.core.errors import DataError
from slurm_resil.format.manifest import Document, Item, ShardManifest, digest, read_item

SENT_CHARS = 1 << 20
_AT = "segment"  # kind of a reference


@dataclass(frozen=True, kw_only=True)
class SlotDescription(Document):
    """What a slot holds, from one layout to the next.

    Attributes:
        items: Items without hashes.
        segments: Parts of the values; a draft refers to them by number.
    """

    items: tuple[Item, ...]
    segments: tuple[Any, ...]

    @classmethod
    def _from_raw(cls, raw: dict[str, Any]) -> SlotDescription:
        return cls(items=tuple(read_item(entry) for entry in raw["items"]), segments=tuple(raw["segments"]))


def describe(job_dir: str, slot: str, items: tuple[Item, ...], segments: tuple[Any, ...]) -> str:
    """Write the description of a slot; returns its hash, for drafts.

    Raises:
        OSError: The file system refused.
    """
    data = SlotDescription(items=items, segments=segments).to_bytes()
    fsio.write_atomic(paths.described(job_dir, slot), data, mode=0o600, sync=False)
    return digest(data)


def send(job_dir: str, manifest: ShardManifest, description: str, segments: tuple[Any, ...]) -> str:
    """What to send of a manifest, see :func:`to_wire`; a large one is put into a file, of which only the name is sent.

    Raises:
        OSError: The file system refused.
    """
    text = to_wire(manifest, description, segments)
    if len(text) <= SENT_CHARS:
        return text
    name = f"draft-{manifest.slot}"
    fsio.write_atomic(paths.described(job_dir, name), text.encode(), mode=0o600, sync=False)
    return json.dumps({"file": name, "generation": manifest.generation})


def to_wire(manifest: ShardManifest, description: str, segments: tuple[Any, ...]) -> str:
    """What to send of a manifest without hashes.

    Args:
        manifest: It.
        description: Hash of the slot's description.
        segments: Parts of ``manifest.values`` that are in it: these very objects.
    """
    numbers = {id(node): number for number, node in enumerate(segments)}

    def short(node: Any) -> Any:
        number = numbers.get(id(node))
        if number is not None:
            return {"$": _AT, "number": number}
        if isinstance(node, dict):
            return {key: short(value) for key, value in node.items()}
        return [short(value) for value in node] if isinstance(node, list) else node

    body = {**vars(replace(manifest, items=(), values=short(manifest.values))), "description": description}
    return json.dumps(body, separators=(",", ":"), allow_nan=False)


@dataclass(frozen=True, kw_only=True)
class Draft(ShardManifest):
    """A manifest without items, and with references in its values.

    Attributes:
        description: Hash of the slot's description.
    """

    description: str


def read(job_dir: str, text: str, where: str) -> Draft:
    """Read what :func:`send` made.

    Raises:
        DataError: It is none.
    """
    try:
        raw = json.loads(text)
        if "file" in raw:
            generation = raw["generation"]
            raw = fsio.read_json(paths.described(job_dir, str(raw["file"])))
            if raw["generation"] != generation:
                raise DataError(f"{where} was written again", fault="stale")
        return Draft(**{**raw, "items": ()})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{where} is no draft of a manifest: {error!r}") from error


class Descriptions:
    """Descriptions of the slots of a rank; each is read once.

    Args:
        job_dir: Job's directory in the burst buffer.
    """

    def __init__(self, job_dir: str) -> None:
        self._job_dir = job_dir
        self._known: dict[str, tuple[str, SlotDescription]] = {}

    def complete(self, draft: Draft) -> ShardManifest:
        """Make the manifest, without hashes.

        Raises:
            DataError: The slot's description is missing, or is not of this save.
        """
        known = self._known.get(draft.slot)
        if known is None or known[0] != draft.description:
            known = self._known[draft.slot] = (draft.description, self._read(draft))
        values = vars(draft) | {"items": known[1].items, "values": _whole(draft.values, known[1].segments)}
        del values["description"]
        return ShardManifest(**values)

    def _read(self, draft: Draft) -> SlotDescription:
        path = paths.described(self._job_dir, draft.slot)
        try:
            data = fsio.read_bytes(path)
        except FileNotFoundError as error:
            raise DataError(f"{path} is missing", path=path, fault="missing") from error
        if digest(data) != draft.description:
            raise DataError(f"{path} is not of this save", path=path, fault="stale")
        return SlotDescription.from_bytes(data, where=path)


def _whole(node: Any, segments: tuple[Any, ...]) -> Any:
    if isinstance(node, Mapping):
        if node.get("$") == _AT:
            return segments[node["number"]]
        return {key: _whole(value, segments) for key, value in node.items()}
    return [_whole(value, segments) for value in node] if isinstance(node, list) else node
