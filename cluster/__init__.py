"""One large model on several hosts: from cluster.yaml to running vLLM processes.

Pure: settings, positions, load, ssh, environment, commands, units, node, fabric.
Shell (pyinfra): inventory, facts, observed, operations. remote/: the programs that run on hosts.
"""
