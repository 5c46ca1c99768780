"""How processes of a job talk: collectives and shared files (base, local, mpi), authenticated channels (channel)."""
