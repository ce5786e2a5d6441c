"""Going on while machines come and go: membership, failure detection, reconfiguration, transfer of state."""
