"""How a process and its child, or a node, call each other."""
