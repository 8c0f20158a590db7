"""Programs that run on the hosts, with nothing but Python 3 and its standard library; prove.py,
ray_nodes.py and hub.py run in containers, with what the image has.

They are sent over stdin (`python3 - NAME JSON`) and leave nothing behind; those that a unit needs
at boot or on a timer are files on the hosts, too (node.PROGRAMS).
"""
