"""One large model on several hosts: from cluster.yaml to running vLLM processes.

Pure: settings, positions, environment, commands, units, node, phases.
Shell (pyinfra): inventory, facts, operations. remote/ holds the programs that run on the hosts.
"""
