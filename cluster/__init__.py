"""One large model on several hosts: from cluster.yaml to running vLLM processes.

Pure: positions, settings, load: cluster.yaml. ssh, environment, commands, units, node: what is made
of it. host_state: what hosts say of themselves; status: what of it is told. image, model: how they
come to the hosts; stored: what is kept there. programs: the texts of remote/; encryption. fabric,
probe, findings: preflight. proof: prove. discovery, hosts_section: discover.
With pyinfra: inventory, transport, facts; observed and memory: what a run knows of its hosts;
shell: what operations share; operations/: a module per task.
remote/: the programs that run on the hosts. *.yaml, read by tables: data, with a source per row.
"""
