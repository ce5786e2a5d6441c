"""Elastic training while machines come and go: membership, failure detection, reconfiguration and state transfer."""
