"""How a run is recorded and shown: registry of metrics, collapse rule, monitor, W&B, dashboards,
page. No torch.
"""
