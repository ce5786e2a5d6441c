"""Tables and sentences for terminals and pages."""
