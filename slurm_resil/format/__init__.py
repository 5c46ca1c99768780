"""What checkpoint, drain and redundancy share: layout, HDF5 container, manifests."""
