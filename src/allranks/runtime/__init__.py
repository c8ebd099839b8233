"""Inside each rank: who it is, its device, its process group."""
