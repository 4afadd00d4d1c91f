"""What is shown of a run: the registry of metrics, the collapse rule, monitor, W&B, dashboards, reports. No torch."""
