"""From faults to incidents: severity, root cause, escalation, closing."""
