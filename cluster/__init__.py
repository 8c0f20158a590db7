"""One large model on several hosts: from cluster.yaml to running vLLM processes.

Pure: positions, settings, load: cluster.yaml. ssh, environment, commands, units, node: what is made
of it. fabric, probe, findings: preflight. proof: prove. discovery, hosts_section: discover.
With pyinfra: inventory, jump, facts, observed, shell, operations, proving, discovering.
remote/: the programs that run on the hosts. *.yaml, read by tables: data, with a source
per row.
"""
