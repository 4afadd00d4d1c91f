"""How a run is recorded and shown: metrics, collapse rule, monitor, W&B, dashboards and page.

No module of this package imports torch.
"""
