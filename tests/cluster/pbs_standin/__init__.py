"""A stand-in for PBS, as strict as a real one: OpenPBS or Torque, by its commands, a server, and a MOM on each node.

What it does and says was recorded from an OpenPBS 23.06.06, or is what Torque 6.1 documents. Programs of their own:
``client`` (each command of PBS, as users call it), ``server`` (the queue), ``mom`` (what starts tasks on one node).
"""
