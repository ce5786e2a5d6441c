"""Pipeline templates for every node count, and a new composition after nodes were lost or joined."""
