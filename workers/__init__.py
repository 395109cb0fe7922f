"""Acts and watches: the agent of each node, and what runs inside a training rank."""
