"""Real agents, coordinators and sockets, with workers so small that hundreds of them can be killed."""
