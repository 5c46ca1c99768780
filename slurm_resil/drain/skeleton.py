"""The empty drained file: one contiguous dataset for each target, whose place in the file is known at once."""

from __future__ import annotations

import numpy as np

from slurm_resil.drain.plan import VALUES_DTYPE, Plan, Target

_ALIGN_FROM_BYTES, _ALIGN_BYTES = 1 << 20, 4096  # small tensors are packed: aligning them makes a file of holes
# name: (size in bytes, sign bit, exponent bits, mantissa bits, bias)
_FLOATS = {
    "bfloat16": (2, 15, 8, 7, 127),
    "float8_e4m3fn": (1, 7, 4, 3, 7),
    "float8_e5m2": (1, 7, 5, 2, 15),
}


def dataset(name: str, rank: int | None) -> str:
    """Name in the file of a global tensor, or of what one rank owns."""
    return f"state/{name}" if rank is None else f"ranks/{rank}/{name}"


def skeleton(path: str, plan: Plan) -> list[int | None]:
    """Make the file; nothing is written to the data.

    Returns:
        Offset of the data of each target, bytes; None for empty ones.

    Raises:
        OSError: The file system refused.
        FileExistsError: There is a file already.
    """
    import h5py

    fapl = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    fapl.set_libver_bounds(h5py.h5f.LIBVER_V18, h5py.h5f.LIBVER_V18)  # newer ones mark the file as open for writing
    fapl.set_file_locking(False, True)
    fapl.set_alignment(_ALIGN_FROM_BYTES, _ALIGN_BYTES)
    fid = h5py.h5f.create(path.encode(), h5py.h5f.ACC_EXCL, fapl=fapl)
    with h5py.File(fid) as file:
        head = plan.head
        file.attrs["run_id"] = head.run_id
        file.attrs["iteration"], file.attrs["world_size"] = head.iteration, head.world_size
        dcpl = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        dcpl.set_layout(h5py.h5d.CONTIGUOUS)
        dcpl.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        dcpl.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        lcpl = h5py.h5p.create(h5py.h5p.LINK_CREATE)
        lcpl.set_create_intermediate_group(True)
        offsets: list[int | None] = []
        for target in plan.targets:
            space = h5py.h5s.create_simple(target.shape) if target.shape else h5py.h5s.create(h5py.h5s.SCALAR)
            name = dataset(target.name, target.rank).encode()
            made = h5py.h5d.create(fid, name, _kind(target), space, dcpl, lcpl)
            h5py.Dataset(made).attrs["dtype"] = target.dtype
            offsets.append(made.get_offset() if target.nbytes else None)
        return offsets


def _kind(target: Target) -> object:
    import h5py

    count = int(np.prod(target.shape, dtype=np.int64))
    name = "uint8" if target.dtype == VALUES_DTYPE else target.dtype.partition(".")[2]
    if name in _FLOATS:
        size, sign, exponent, mantissa, bias = _FLOATS[name]
        kind = h5py.h5t.IEEE_F16LE.copy()
        kind.set_fields(sign, mantissa, exponent, 0, mantissa)
        kind.set_size(size)
        kind.set_ebias(bias)
        return kind
    try:
        return h5py.h5t.py_create(np.dtype(name))
    except TypeError:
        return h5py.h5t.py_create(np.dtype(f"V{target.nbytes // count}" if target.nbytes else "u1"))
