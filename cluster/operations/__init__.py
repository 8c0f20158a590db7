"""pyinfra operations: each brings one thing on a host to what cluster.yaml says, or says why not.

Every one compares first and does nothing where nothing differs, so that a second run is all
"No changes". A module has the name of its task; services: what several of them need.
"""
