"""Programs that run on the hosts, with nothing but Python 3 and its standard library.

They are sent over stdin (`python3 - NAME JSON`) and leave nothing behind; ray_nodes.py alone is
also a file on the head, because the serve unit runs it at boot inside Ray's container.
"""
