"""Pipeline templates for every node count, and the choice of new pipelines after nodes were lost or joined."""
